"""What ``mpiddl bench`` measures: one subject a file, and how rows are shown and kept (`output`)."""

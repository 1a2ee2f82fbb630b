"""Messages and one-sided memory over verbs, the native interface of InfiniBand and RoCE."""

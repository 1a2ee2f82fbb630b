"""A training run, from the settings to the summary, and the trained model. `mpiddl.training.run` has the entry points."""

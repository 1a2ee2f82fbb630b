"""What the tests stand on: starting jobs, ending hangs, sharing outcomes. See docs/testing.md."""

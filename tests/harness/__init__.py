"""What the tests stand on: starting jobs, ending hangs, and outcomes that all ranks share. See docs/testing.md."""

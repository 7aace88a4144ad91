"""The actions of `sage-data`: check, convert, statistics, regenerate. The command line is train.cli.data."""

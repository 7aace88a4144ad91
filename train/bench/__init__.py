"""What training costs: the objective against the naive loss, and a whole step against its parts. `python -m train.bench`."""

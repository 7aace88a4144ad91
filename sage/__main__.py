"""`python -m sage`: sage-generate."""

from sage.commands.generate import main

if __name__ == "__main__":
    main()

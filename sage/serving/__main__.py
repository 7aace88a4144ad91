"""`python -m sage.serving`: sage-serve."""

from sage.serving.command import main

if __name__ == "__main__":
    main()

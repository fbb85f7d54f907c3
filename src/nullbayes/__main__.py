"""Lets ``python -m nullbayes`` stand for the command ``nullbayes``."""

from nullbayes.cli import main

if __name__ == "__main__":
    main()

"""Lets ``python -m nullbayes`` stand for the command ``nullbayes``.

Python itself looks for modules in the current folder first when it is called so: among files of strangers use the
command, or ``python -P -m nullbayes``.
"""

from nullbayes.cli import main

if __name__ == "__main__":
    main()

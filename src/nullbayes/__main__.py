"""Makes ``python -m nullbayes`` the same as the command ``nullbayes``.

With ``-m``, Python looks for modules in the current folder first. In a folder of untrusted files use the command
``nullbayes``, or ``python -P -m nullbayes``.
"""

import sys

from nullbayes.command import main

if __name__ == "__main__":
    sys.exit(main())

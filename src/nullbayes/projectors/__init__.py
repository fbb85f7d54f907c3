"""Projectors: ways to compute the part of a vector that lies in the null space of a set of rows.

===================  ======================================================================================
``ExactDual``        factor or eigenvectors of the Gram matrix of the rows: few rows
``ExactPrimal``      eigenvectors of A⊤A: few parameters, any number of rows; can truncate to a tolerance
``Alternating``      block after block, the paper's algorithm: a few blocks of more rows than parameters
``Krylov``           conjugate gradients around it: the default; with a single block, a direct method refined
``Sketched``         conjugate gradients on all rows, preconditioned by a part of them: examples with many outputs
``Lanczos``          removes a Krylov space: where not even a block of rows can be formed
===================  ======================================================================================

``choose`` picks one by rows, parameters and memory, and says why. ``prepare`` and ``apply`` of every projector return a
``Projection`` with its ``Info``.

For a projector of your own: ``Projector`` or ``Iterative`` to derive from, ``check_tolerance`` and ``check_noise`` for
what it is given, and ``finish_projection``, which judges an ``Attempt``.
"""

from nullbayes.projectors.alternating import Alternating as Alternating
from nullbayes.projectors.auto import choose as choose
from nullbayes.projectors.auto import least_bytes as least_bytes
from nullbayes.projectors.base import Info as Info
from nullbayes.projectors.base import Outcome as Outcome
from nullbayes.projectors.base import Projection as Projection
from nullbayes.projectors.base import Projector as Projector
from nullbayes.projectors.direct import ExactDual as ExactDual
from nullbayes.projectors.direct import ExactPrimal as ExactPrimal
from nullbayes.projectors.direct import Lanczos as Lanczos
from nullbayes.projectors.iteration import Iterative as Iterative
from nullbayes.projectors.krylov import Krylov as Krylov
from nullbayes.projectors.plan import Plan as Plan
from nullbayes.projectors.sketched import Sketched as Sketched
from nullbayes.projectors.stopping import Attempt as Attempt
from nullbayes.projectors.stopping import check_noise as check_noise
from nullbayes.projectors.stopping import check_tolerance as check_tolerance
from nullbayes.projectors.stopping import finish_projection as finish_projection

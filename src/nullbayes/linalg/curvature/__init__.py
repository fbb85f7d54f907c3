r"""Curvatures: a positive semi-definite matrix :math:`C` over the parameters, in a form that uses little memory.

A Laplace approximation asks the same of every form: samples of :math:`\mathcal N(0, (C + \alpha I)^{-1})` from standard
normal noise, the variance of linear functions under that distribution, and eigenvalues for the marginal likelihood.

    Diagonal      the diagonal alone
    LowRank       some eigenpairs, and zero outside their span
    Kronecker     a Kronecker product of two small matrices for each layer
    Primal        the whole matrix
    Dual          :math:`A^\top A` by the Gram matrix of its rows: for fewer rows than columns
    MatrixFree    :math:`A^\top A` by products alone, solved by conjugate gradients
"""

from nullbayes.linalg.curvature.base import Curvature as Curvature
from nullbayes.linalg.curvature.base import estimated_spectrum as estimated_spectrum
from nullbayes.linalg.curvature.dense import FACTORED_BYTES as FACTORED_BYTES
from nullbayes.linalg.curvature.dense import Dual as Dual
from nullbayes.linalg.curvature.dense import Primal as Primal
from nullbayes.linalg.curvature.low_rank import LowRank as LowRank
from nullbayes.linalg.curvature.low_rank import lanczos_pairs as lanczos_pairs
from nullbayes.linalg.curvature.low_rank import nystrom_pairs as nystrom_pairs
from nullbayes.linalg.curvature.matrix_free import MatrixFree as MatrixFree
from nullbayes.linalg.curvature.structured import Diagonal as Diagonal
from nullbayes.linalg.curvature.structured import Kronecker as Kronecker
from nullbayes.linalg.curvature.structured import KroneckerBlock as KroneckerBlock
from nullbayes.linalg.curvature.structured import column_squares as column_squares
from nullbayes.linalg.curvature.structured import decomposed as decomposed

"""Matrices and dense answers for trying out projectors: used by our tests, and open to yours.

=============================  ===========================================================================
`cases`, `Case`                small matrices with prescribed spectra, and what to expect of each
`matrix_from_singular_values`  a matrix with a spectrum of your own
`kernel_projector`             the dense projector on the kernel, by singular value decomposition
`kernel_dimension`             the dimension of the kernel, by the same
=============================  ===========================================================================

Try a projector of your own on every case::

    @pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
    def test_projects_on_the_kernel(case): ...
"""

from nullbayes.testing.matrices import Case, cases, matrix_from_singular_values
from nullbayes.testing.oracles import kernel_dimension, kernel_projector

__all__ = ["Case", "cases", "kernel_dimension", "kernel_projector", "matrix_from_singular_values"]

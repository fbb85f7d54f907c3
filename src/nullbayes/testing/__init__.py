"""Matrices and dense reference results for testing projectors, in our tests and in yours.

=============================  ===========================================================================
`cases`, `Case`                small matrices with prescribed spectra, and what to expect on each
`matrix_from_singular_values`  a matrix with given singular values
`kernel_projector`             the dense projector onto the null space, from a singular value decomposition
`kernel_dimension`             the dimension of the null space, from the same
=============================  ===========================================================================

To test your own projector on every case::

    @pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
    def test_projects_onto_the_null_space(case): ...
"""

from nullbayes.testing.matrices import Case, cases, matrix_from_singular_values
from nullbayes.testing.oracles import kernel_dimension, kernel_projector

__all__ = ["Case", "cases", "kernel_dimension", "kernel_projector", "matrix_from_singular_values"]

"""The oracle and the library form the same rows: without this, no other test here would compare like with like."""

from collections.abc import Callable

import numpy as np
import pytest

import nullbayes as nb
from support.paper.fitting import name_of
from support.paper.networks import Trained, classifier, regressor, underparametrized


@pytest.mark.parametrize("network", [classifier, regressor, underparametrized], ids=name_of)
def test_library_forms_the_rows_of_the_oracle(network: Callable[[], Trained]) -> None:
    trained = network()
    outputs = nb.OutputJacobian(trained.model, trained.loader, trained.likelihood).dense().cpu().numpy()
    np.testing.assert_allclose(outputs, trained.jacobian, rtol=1e-10, atol=1e-12)
    losses = nb.LossJacobian(trained.model, trained.loader, trained.loss).dense().cpu().numpy()
    np.testing.assert_allclose(losses, trained.loss_gradients, rtol=1e-10, atol=1e-12)

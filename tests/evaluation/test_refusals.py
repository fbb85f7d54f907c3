"""`nb.evaluate` refuses what cannot be compared, and says what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.errors import DataError, LikelihoodError, NotFittedError, SettingsError
from support.evaluated import FAR, STRANGERS, N, X, Y, fitted
from support.models import MLP, REGRESSION


def test_sets_that_cannot_be_compared_are_refused(projected: Any) -> None:
    def ask(in_data: Any = (X, Y), strangers: Any = STRANGERS, **options: Any) -> None:
        nb.evaluate([projected], in_data, strangers, **options)

    with pytest.raises(DataError, match="strangers must be a mapping from names to inputs"):
        ask(strangers=FAR)
    with pytest.raises(DataError, match=r"strangers\['far'\]: There is nothing to predict"):
        ask(strangers={"far": FAR[:0]})
    with pytest.raises(DataError, match=r"strangers\['far'\]: There is nothing to predict"):
        ask(strangers={"far": []})
    with pytest.raises(DataError, match="in_data: The loader is empty"):
        ask([])
    with pytest.raises(DataError, match="in_data: Batch 0 is empty"):
        ask((X[:0], Y[:0]))
    with pytest.raises(DataError, match=r"in_data has no targets: pass a pair in brackets, .*\(x, y\)"):
        ask(X)
    with pytest.raises(DataError, match=r"in_data: Batch 0: .*\(inputs, targets\)"):
        ask([X])
    with pytest.raises(DataError, match="in_data can be read only once"):
        ask(iter([(X, Y)]))
    with pytest.raises(DataError, match=r"strangers\['far'\] can be read only once"):
        ask(strangers={"far": iter([FAR])})
    with pytest.raises(DataError, match="random order"):
        ask(DataLoader(TensorDataset(X, Y), shuffle=True))
    with pytest.raises(DataError, match="Every target of in_data is one to be ignored"):
        ask((X, torch.full_like(Y, -100)))
    with pytest.raises(LikelihoodError, match="labels must be 0 to 2"):
        ask((X, Y + 1))
    with pytest.raises(LikelihoodError, match="pass integer labels"):
        ask((X, F.one_hot(Y, 3).double()))
    with pytest.raises(SettingsError, match="bootstrap must be a number of resamples"):
        ask(bootstrap=-1)
    with pytest.raises(SettingsError, match="mask must be a function"):
        ask(mask=torch.ones(N, 2))


def test_methods_that_cannot_be_compared_are_refused(projected: Any, network: Any, ensemble: Any) -> None:
    def ask(methods: Any, **options: Any) -> None:
        nb.evaluate(methods, (X, Y), STRANGERS, **options)

    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask([nb.ProjectedPosterior(MLP.build(3))])
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask({"a": nb.baselines.LocalEnsemble(MLP.build(3))})
    with pytest.raises(SettingsError, match="'a' is a Sequential, which has no ood_score"):
        ask({"a": MLP.build(3)})
    with pytest.raises(SettingsError, match=r"'a' is the class KNN: pass an object, KNN\(model\)\.fit\(x, y\)"):
        ask({"a": nb.detectors.KNN})
    with pytest.raises(SettingsError, match=r"'KNN' is the class KNN: pass an object"):
        ask([nb.detectors.KNN])
    with pytest.raises(SettingsError, match="There is no method to evaluate"):
        ask([])
    with pytest.raises(SettingsError, match="methods must be a mapping"):
        ask("projected")
    with pytest.raises(SettingsError, match="names of methods must be strings, not 0"):
        ask({0: projected})
    with pytest.raises(SettingsError, match=r"'network' \(MAP\) has no score 'max_variance': it has max_probability"):
        ask({"network": network}, scores="max_variance")
    with pytest.raises(SettingsError, match=r"no score 'surprise': it has local_ensemble"):
        ask({"ensemble": (ensemble, "surprise")})
    with pytest.raises(SettingsError, match="scores must be None"):
        ask([projected], scores=["energy"])
    with pytest.raises(SettingsError, match="Two rows of the table would be called 'ProjectedPosterior'"):
        ask([projected, projected])
    with pytest.raises(SettingsError, match="Two rows of the table would be called 'a: energy'"):
        ask({"a": projected, "a: energy": (network, "energy")}, scores="all")
    regression = fitted(nb.ProjectedPosterior, REGRESSION)
    with pytest.raises(LikelihoodError, match=r"classification .* and regression .* a table of its own"):
        ask({"a": projected, "b": regression})
    with pytest.raises(SettingsError, match="regression likelihood; leave it out"):
        nb.evaluate([fitted(nb.baselines.MAP, REGRESSION)], (X, Y), STRANGERS)

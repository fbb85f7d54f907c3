"""Copies of a posterior: deep ones and pickled ones carry the model and the samples, as a file and its model do."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from nullbayes.errors import SettingsError


class Copied(ABC):
    """What ``copy`` and ``pickle`` ask an object; abstract: a subclass names the functions that it was given."""

    @abstractmethod
    def _functions(self) -> Mapping[str, Any]:
        """Return what the user gave, by argument."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a deep or a pickled copy takes along."""
        return dict(vars(self))

    def __copy__(self) -> Self:
        """Return another with everything in common."""
        return self._with(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another with a model of its own; functions are the same."""
        return self._with(copy.deepcopy(self.__getstate__(), memo))

    def _with(self, state: Mapping[str, Any]) -> Self:
        new = object.__new__(type(self))
        vars(new).update(state)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse functions that pickle cannot name, where a file would do."""
        for name, function in self._functions().items():
            try:
                pickle.dumps(function)
            except Exception as error:
                msg = (
                    f"pickle cannot hold {name}=..., which was not defined at the top of a module: use "
                    f"posterior.save(path), and pass it again to nb.load(path, model, {name}=...)."
                )
                raise SettingsError(msg) from error
        return super().__reduce_ex__(protocol)

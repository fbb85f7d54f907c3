"""Threads may share a network, copies have their own, and torch's switches come back."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.jacobian.network import Network
from nullbayes.precision import differentiable, plain_recurrence, uncompiled
from support import zoo
from support.layer_table import build, randn
from support.models import CLASSIFICATION, MLP, Slow
from support.slow_answers import jacobian


def test_threads_share_a_network() -> None:
    model, x, y = build("conv2d")
    rows, wanted = nb.OutputJacobian(model, [(x, y)]), jacobian(model, x).flatten(0, 1)
    with ThreadPoolExecutor(4) as threads:
        for entries in threads.map(lambda _: rows.dense(), range(24)):
            torch.testing.assert_close(entries, wanted)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of the first product in a thread
def test_threads_evaluate_a_network_each_at_its_own_parameters() -> None:
    network, (x, _) = Network(Slow().double()), CLASSIFICATION.data()
    flats = [network.theta * scale for scale in range(8)]
    wanted = [network(flat, x) for flat in flats]
    with ThreadPoolExecutor(4) as threads:
        torch.testing.assert_close(list(threads.map(lambda flat: network(flat, x), flats)), wanted)


def test_the_switches_of_torch_come_back_when_the_last_thread_is_done() -> None:
    first, second = differentiable(), differentiable()
    with first:
        second.__enter__()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_network_can_be_copied_and_pickled() -> None:
    network, (x, _) = Network(MLP.build()), CLASSIFICATION.data()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert twin.lock is not network.lock
        torch.testing.assert_close(twin.outputs(x), network.outputs(x))


def test_a_network_with_switches_can_be_copied() -> None:
    network, x = Network(zoo.recurrent(nn.GRU)()), randn(3, 5, 3).float()
    torch.testing.assert_close(copy.deepcopy(network).outputs(x), network.outputs(x))


def test_switches_are_put_back_by_the_last_who_needs_them() -> None:
    assert torch.backends.mkldnn.enabled
    with plain_recurrence():
        with plain_recurrence():
            assert not torch.backends.mkldnn.enabled
            assert not torch.backends.cudnn.enabled
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    for switches in (plain_recurrence, uncompiled):
        assert copy.deepcopy(switches) is switches
        assert pickle.loads(pickle.dumps(switches)) is switches


def test_copies_are_whole_while_another_thread_predicts() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(12, 4)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x, torch.arange(12) % 3, 5, progress=False)
    wanted, done = posterior.predict(x[:1]).variance, threading.Event()

    def serve() -> None:
        while not done.is_set():
            posterior.predict(x[:1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        copies = [copy.deepcopy(posterior) for _ in range(15)]
        copies += [pickle.loads(pickle.dumps(posterior)) for _ in range(15)]
    finally:
        done.set()
        thread.join()
    for each in copies:
        torch.testing.assert_close(each.predict(x[:1]).variance, wanted)

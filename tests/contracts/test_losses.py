"""What every loss of the registry must do, whatever its formula."""

from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from mdiff_core.contracts import Loss, RowKind
from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.options import Choice
from mdiff_core.registry import REGISTRY, make
from mdiff_core.sigmas import flow_match_sigmas
from mdiff_core.types import Conditioning, Frozen
from tests.toy_policies import ToyPolicies, clean_rows, preferences, samples, transitions

VARIANTS = {
    "awm": [{}, {"kl": 0.5, "weighting": "huber", "clip": 1e-3}, {"weighting": "t2"}],
    "dpo": [{}, {"against": "start", "beta": 10.0}],
    "dppo": [{}, {"beta": 0.04, "limit": 1e-9}],
    "flow_grpo": [{}, {"beta": 0.04}, {"beta": 0.04, "kl_against": "ema"}],
    "grpo_guard": [{}, {"beta": 0.04, "kl_against": "start"}],
    "nft": [{}, {"beta": 0.1, "kl": 0.5, "advantages": "binary"}, {"adaptive": False}],
    "sft": [{}, {"sampling": "uniform", "shift": 3.0, "weighting": "cosmap"}],
}
"""Options worth a run of their own; a loss without a line here runs with its defaults."""

OWN = sorted(name for name, where in REGISTRY["loss"].items() if where.startswith("mdiff_core."))
"""Without those that other tests have registered."""
CASES = [(name, options) for name in OWN for options in VARIANTS.get(name, [{}])]
ADVANTAGE = [1.0, -2.0, 0.5, 3.0]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def loss(request):
    name, options = request.param
    return make("loss", Choice(name=name, options=options))


@pytest.fixture
def policies(loss):
    return ToyPolicies(FlowSDE(FlowSDEOptions()), loss.needs.policies)


@pytest.fixture
def rows(loss, policies):
    sigmas = flow_match_sigmas(10, 3.0)
    by_kind = {
        "transitions": lambda: transitions(policies.live, sigmas, [0, 3, 8, 9], ADVANTAGE),
        "clean": lambda: clean_rows(ADVANTAGE),
        "samples": lambda: samples(ADVANTAGE, sigmas[[0, 3, 8, 9]].tolist()),
        "preferences": lambda: preferences(sigmas[[0, 3, 8, 9]].tolist()),
    }
    return by_kind[loss.rows]()


def take(rows, index):
    """Rows at `index`, in that order."""
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return replace(rows, **{k: v if isinstance(v, Conditioning) else v[index] for k, v in tensors.items()})


def gradient(loss, policies):
    """Of the live policy, flat."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policies.live.parameters()))])


def close(got, wanted):
    """Equal up to how a batch of another size is vectorised, a few units of float32."""
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_is_a_loss(loss):
    assert isinstance(loss, Loss)
    assert loss.rows in get_args(RowKind)
    assert loss.needs.policies <= {*get_args(Frozen)}
    assert (loss.needs.timesteps > 0) == (loss.rows in ("samples", "preferences"))


def test_gives_one_finite_number_a_row(loss, policies, rows):
    cells = loss(policies, rows)
    assert cells.loss.shape == (4,) and cells.loss.requires_grad
    assert torch.isfinite(cells.loss).all()
    assert cells.metrics
    for name, value in cells.metrics.items():
        assert value.shape == (4,) and not value.requires_grad, name
        assert torch.isfinite(value).all(), name


def test_trains_the_live_policy_alone(loss, policies, rows):
    loss(policies, rows).loss.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in policies.live.parameters())
    assert any(p.grad.any() for p in policies.live.parameters())
    assert all(p.grad is None for frozen in policies.others.values() for p in frozen.parameters())


def test_order_of_rows_changes_nothing(loss, policies, rows):
    order = [2, 0, 3, 1]
    close(loss(policies, take(rows, order)).loss, loss(policies, rows).loss[order])


def test_micro_batches_change_nothing(loss, policies, rows):
    whole = loss(policies, rows)
    parts = [loss(policies, take(rows, index)) for index in ([0], [1, 2], [3])]
    close(torch.cat([part.loss for part in parts]), whole.loss)
    for name, value in whole.metrics.items():
        close(torch.cat([part.metrics[name] for part in parts]), value)
    summed = sum(gradient(part.loss.sum(), policies) for part in parts)
    # Only the order of a float32 sum differs.
    torch.testing.assert_close(summed, gradient(whole.loss.sum(), policies), rtol=1e-4, atol=1e-6)


def test_randomness_comes_from_the_rows_seeds(loss, policies, rows):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = loss(policies, rows).loss
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(loss(policies, rows).loss, first)


def test_unknown_option_is_refused(loss):
    with pytest.raises(ValueError, match="betta"):
        type(loss).Options.from_json('{"betta": 1}')

"""Laws that hold across the losses of the registry."""

from dataclasses import replace

import pytest
import torch

from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.options import Choice
from mdiff_core.registry import REGISTRY, find, make
from mdiff_core.sigmas import flow_match_sigmas
from tests.toy_policies import ToyPolicies, preferences, samples, transitions

SIGMAS = flow_match_sigmas(10, 3.0)
STEPS = [0, 3, 8, 9]
OWN = [name for name, where in REGISTRY["loss"].items() if where.startswith("mdiff_core.")]
"""Without those that other tests have registered."""
RATIO = [name for name in OWN if find("loss", name).rows == "transitions"]
KL = {name: "kl" if name in ("nft", "awm") else "beta" for name in (*RATIO, "nft", "awm")}
"""The weight of each loss's KL term."""


def loss_of(name, **options):
    return make("loss", Choice(name=name, options=options))


def world(loss, advantage, *, on_policy=("old",)):
    """The loss's policies, those of `on_policy` being what the live one is, and its rows."""
    policies = ToyPolicies(FlowSDE(FlowSDEOptions()), loss.needs.policies).on_policy(*on_policy)
    if loss.rows == "preferences":
        return policies, preferences(SIGMAS[STEPS].tolist())
    if loss.rows == "samples":
        return policies, samples(advantage, SIGMAS[STEPS].tolist())
    return policies, transitions(policies.live, SIGMAS, STEPS, advantage)


def gradient(loss, policies, rows):
    parts = torch.autograd.grad(loss(policies, rows).loss.sum(), list(policies.live.parameters()))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", [*RATIO, "nft", "awm"])
def test_zero_advantage_gives_zero_policy_gradient(name):
    loss = loss_of(name)
    policies, rows = world(loss, [0.0] * 4)
    # nft's two pulls are equal and opposite, each rounded by itself: gradients at an advantage of 1 are of order 1.
    assert gradient(loss, policies, rows).abs().max() < 1e-6
    assert gradient(loss, *world(loss, [1.0] * 4)).abs().max() > 1e-3


@pytest.mark.parametrize("name", RATIO)
def test_zero_advantage_gives_exactly_no_gradient_however_far_a_ratio_has_moved(name):
    loss = loss_of(name)
    policies, rows = world(loss, [0.0] * 4, on_policy=())
    rows = replace(rows, log_prob=rows.log_prob - torch.tensor([0.3, -0.3, 0.0, 1e-5]))
    assert not gradient(loss, policies, rows).any()


@pytest.mark.parametrize("against", ["reference", "start", "ema"])
@pytest.mark.parametrize("name", KL)
def test_every_kl_moves_the_gradient_towards_where_it_is_measured_from(name, against):
    loss = loss_of(name, **{KL[name]: 1.0, "kl_against": against})
    assert against in loss.needs.policies
    policies, rows = world(loss, [0.0] * 4)
    with_kl, without = gradient(loss, policies, rows), gradient(loss_of(name), policies, rows)
    assert (with_kl - without).abs().max() > 1e-3
    before = loss(policies, rows).metrics["kl"]
    with torch.no_grad():
        flat = iter((with_kl - without).split([p.numel() for p in policies.live.parameters()]))
        for parameter in policies.live.parameters():
            parameter -= 1e-3 * next(flat).reshape(parameter.shape)
    assert loss(policies, rows).metrics["kl"].sum() < before.sum()
    assert not world_kl(name, against).any()


def world_kl(name, against):
    """The KL between equal policies."""
    loss = loss_of(name, **{KL[name]: 1.0, "kl_against": against})
    return loss(*world(loss, [1.0] * 4, on_policy=("old", against))).metrics["kl"]


@pytest.mark.parametrize("name", [*RATIO, "awm"])
def test_on_the_first_step_every_ratio_is_one(name):
    loss = loss_of(name)
    cells = loss(*world(loss, [0.5, -1.0, 2.0, 0.0]))
    # Equal policies and equal code: not a bit differs, of the 1e-6 that would do.
    assert torch.equal(cells.metrics["ratio"], torch.ones(4))
    assert not cells.metrics["clip_fraction"].any()


@pytest.mark.parametrize("name", sorted(KL))
def test_without_a_kl_term_its_policy_is_not_asked_for(name):
    assert loss_of(name).needs.policies <= {"old"}

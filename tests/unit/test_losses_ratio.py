"""grpo_guard and dppo: their numbers, and where they stop."""

import math
from dataclasses import replace

import pytest
import torch

from mdiff_core.kernels.cps import CPS, CPSOptions
from mdiff_core.kernels.dance_sde import DanceSDE, DanceSDEOptions
from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.losses.dppo import DPPO, DPPOOptions
from mdiff_core.losses.grpo_guard import GRPOGuard, GRPOGuardOptions
from mdiff_core.sigmas import flow_match_sigmas
from tests.toy_policies import ToyPolicies, transitions

SIGMAS = flow_match_sigmas(10, 3.0)
STEPS = [0, 3, 8, 9]
KERNELS = [FlowSDE(FlowSDEOptions(eta=0.7)), DanceSDE(DanceSDEOptions(eta=0.3))]


def guard(**options):
    return GRPOGuard(GRPOGuardOptions(**options))


def dppo(**options):
    return DPPO(DPPOOptions(**options))


def drawn_by_old(kernel, advantage, steps=STEPS, near=0.01):
    """Rows drawn by the old policy, which the live one has moved from a little."""
    policies = ToyPolicies(kernel, {"old"}).on_policy("old")
    rows = transitions(policies.others["old"], SIGMAS, steps, advantage)
    with torch.no_grad():
        for parameter in policies.live.parameters():
            parameter += near
    return policies, rows


def gradients(loss, policies):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policies.live.parameters()))])


@pytest.mark.parametrize("kernel", KERNELS)
def test_guard_is_its_formula(kernel):
    policies, rows = drawn_by_old(kernel, [1.0, -2.0, 0.5, -1.0])
    cells = guard(clip=1e-3)(policies, rows)
    live, old = policies.live.transition(rows), policies.others["old"].transition(rows)
    dt = rows.sigma_next - rows.sigma
    bias = ((live.mean - old.mean) ** 2).mean((1, 2, 3)) / (2 * live.scale**2)
    log_prob = kernel.log_prob(rows.x_next, live)
    ratio = torch.exp((log_prob - rows.log_prob + bias) * torch.sqrt(-dt) * live.std)
    bounded = ratio.clamp(1 - 1e-3, 1 + 1e-3)
    wanted = torch.maximum(-rows.advantage * ratio, -rows.advantage * bounded) / -dt
    torch.testing.assert_close(cells.loss, wanted)
    torch.testing.assert_close(cells.metrics["ratio"], ratio.detach())
    torch.testing.assert_close(cells.metrics["bias"], bias.detach())


@pytest.mark.parametrize("kernel", KERNELS)
def test_guards_log_ratio_is_the_noise_along_the_way_the_mean_moved(kernel):
    # log p - log p_old + b is mean(delta z) / scale: no mean of its own, and once scaled no scale of the step's.
    policies, rows = drawn_by_old(kernel, [1.0] * 4)
    live, old = policies.live.transition(rows), policies.others["old"].transition(rows)
    z = (rows.x_next - old.mean) / old.scale.reshape(-1, 1, 1, 1)
    wanted = ((live.mean - old.mean) * z).mean((1, 2, 3))
    got = torch.log(guard()(policies, rows).metrics["ratio"])
    # A float32 log-prob of order 1 is known to 6e-8, and so is a ratio near 1.
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-3, atol=3e-7)


def test_guards_ratio_has_a_mean_of_one_where_flow_grpos_is_below():
    policies = ToyPolicies(KERNELS[0], {"old"}).on_policy("old")
    steps = [3] * 4000
    rows = transitions(policies.others["old"], SIGMAS, steps, [1.0] * 4000)
    with torch.no_grad():
        policies.live.b += 1.0
    cells = guard()(policies, rows)
    guarded = torch.log(cells.metrics["ratio"])
    plain = guarded / policies.live.transition(rows).scale.detach() - cells.metrics["bias"]
    # A mean of 4000 strays by 1/63 of a standard deviation; 4 of those are allowed.
    assert abs(guarded.mean()) < 4 * guarded.std() / 63
    assert plain.mean() < -4 * plain.std() / 63


def test_guard_at_a_step_without_noise_trains_nothing():
    policies, rows = drawn_by_old(CPS(CPSOptions()), [1.0], steps=[9])
    cells = guard()(policies, rows)
    assert cells.metrics["noiseless"].tolist() == [1] and not gradients(cells.loss.sum(), policies).any()


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("log_ratio", [-0.5, -1e-4, 1e-4, 0.5])
@pytest.mark.parametrize("near", [0.0, 0.5])
def test_dppo_stops_where_the_divergence_is_past_its_limit_and_the_ratio_moved_the_advantages_way(
    advantage, log_ratio, near
):
    policies, rows = drawn_by_old(KERNELS[0], [advantage], steps=[3], near=near)
    with torch.no_grad():
        rows = replace(rows, log_prob=policies.live.log_prob(rows.x_next, policies.live.transition(rows)) - log_ratio)
    cells = dppo()(policies, rows)
    far = cells.metrics["divergence"].item() >= 1e-5
    assert far == (near > 0)
    stopped = far and ((advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0))
    assert cells.metrics["clip_fraction"].item() == stopped
    wanted = 0.0 if stopped else -advantage * math.exp(log_ratio)
    assert cells.loss.item() == pytest.approx(wanted, rel=1e-5)
    assert gradients(cells.loss.sum(), policies).any() == (not stopped and advantage != 0)


@pytest.mark.parametrize("kernel", [*KERNELS, CPS(CPSOptions())])
def test_dppos_divergence_is_that_of_two_gaussians(kernel):
    policies, rows = drawn_by_old(kernel, [1.0] * 3, steps=[0, 3, 8], near=0.5)
    live, old = policies.live.transition(rows), policies.others["old"].transition(rows)
    scale = live.scale.double().reshape(-1, 1, 1, 1).expand_as(live.mean)
    one, other = (torch.distributions.Normal(each.mean.double(), scale) for each in (live, old))
    wanted = torch.distributions.kl_divergence(one, other).mean((1, 2, 3))
    got = dppo()(policies, rows).metrics["divergence"]
    torch.testing.assert_close(got.double(), wanted.detach(), rtol=1e-5, atol=1e-9)


def test_dppo_without_a_limit_in_reach_is_the_policy_gradient():
    policies, rows = drawn_by_old(KERNELS[0], [1.0, -2.0, 0.5, -1.0])
    got = gradients(dppo(limit=1e3)(policies, rows).loss.sum(), policies)
    ratio = torch.exp(policies.live.log_prob(rows.x_next, policies.live.transition(rows)) - rows.log_prob)
    torch.testing.assert_close(got, gradients(-(rows.advantage * ratio).sum(), policies))


@pytest.mark.parametrize("make", [guard, dppo])
@pytest.mark.parametrize("options", [{"beta": -1.0}, {"kl_against": "old"}, {"clip": 0.0}, {"limit": 0.0}])
def test_senseless_options_are_refused(make, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make(**options)

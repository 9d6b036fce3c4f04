import math
from dataclasses import replace

import pytest
import torch

from mdiff_core import seeds
from mdiff_core.kernels.cps import CPS, CPSOptions
from mdiff_core.kernels.dance_sde import DanceSDE, DanceSDEOptions
from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.losses.flow_grpo import FlowGRPO, FlowGRPOOptions
from mdiff_core.losses.sft import SFT, SFTOptions
from mdiff_core.objectives import clipped, distance
from mdiff_core.sigmas import flow_match_sigmas
from mdiff_core.types import Moments
from tests.toy_policies import ToyPolicies, clean_rows, transitions

SIGMAS = flow_match_sigmas(10, 3.0)
KERNELS = [FlowSDE(FlowSDEOptions(eta=0.7)), CPS(CPSOptions(eta=0.8)), DanceSDE(DanceSDEOptions(eta=0.3))]
STEPS = [0, 3, 8, 9]
"""The first (sigma 1), a middle one and the last two (sigma_next 0)."""


def flow_grpo(**options):
    return FlowGRPO(FlowGRPOOptions(**options))


def toy(kernel=KERNELS[0], steps=STEPS, advantage=None, needs=(), **change):
    policies = ToyPolicies(kernel, needs)
    return policies, transitions(policies.live, SIGMAS, steps, advantage or [1.0] * len(steps), **change)


def gradients(loss, policies):
    """Of the live policy, flat; None when the loss does not depend on it."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policies.live.parameters()))])


class TestPolicyTerm:
    @pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
    @pytest.mark.parametrize("log_ratio", [-0.5, -2e-4, -5e-5, 0.0, 5e-5, 2e-4, 0.5])
    def test_value_and_clip_exactly_where_they_should_be(self, advantage, log_ratio):
        moved = torch.tensor([log_ratio], requires_grad=True)
        term, stops = clipped(torch.exp(moved), torch.tensor([advantage]), 1e-4)
        ratio = math.exp(log_ratio)
        stopped = (advantage > 0 and ratio > 1 + 1e-4) or (advantage < 0 and ratio < 1 - 1e-4)
        bounded = min(max(ratio, 1 - 1e-4), 1 + 1e-4)
        # A ratio near 1 in float32 is known to 6e-8.
        assert term.item() == pytest.approx(max(-advantage * ratio, -advantage * bounded), rel=3e-7)
        (gradient,) = torch.autograd.grad(term, moved)
        assert stops.item() == stopped
        assert gradient.item() == pytest.approx(0.0 if stopped else -advantage * ratio, rel=3e-7)

    def test_the_edge_itself_still_pulls(self):
        moved = torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            moved += torch.tensor([-1e-12, 1e-12])
        term, stopped = clipped(torch.exp(moved), torch.tensor([1.0, -1.0]), 0.5)
        assert not stopped.any()
        assert torch.autograd.grad(term.sum(), moved)[0].abs().min() > 0.4


class TestFlowGRPO:
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_on_policy_the_ratio_is_one_and_the_loss_minus_the_advantage(self, kernel):
        policies, rows = toy(kernel, advantage=[0.5, -1.0, 2.0, 0.0])
        cells = flow_grpo()(policies, rows)
        # step and log_prob are the same code, so on one device not a bit differs.
        assert torch.equal(cells.metrics["ratio"], torch.ones(4))
        assert torch.equal(cells.loss.detach(), -rows.advantage)
        assert cells.metrics["abs_log_ratio"].max() == cells.metrics["approx_kl"].max() == 0

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_gradient_on_policy_is_that_of_the_log_prob(self, kernel):
        policies, rows = toy(kernel, steps=[0, 3, 8], advantage=[0.5, -1.0, 2.0])
        got = gradients(flow_grpo()(policies, rows).loss.sum(), policies)
        log_prob = policies.live.log_prob(rows.x_next, policies.live.transition(rows))
        wanted = gradients(-(rows.advantage * log_prob).sum(), policies)
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted)

    def test_zero_advantage_gives_zero_policy_gradient(self):
        policies, rows = toy(advantage=[0.0] * 4)
        rows = replace(rows, log_prob=rows.log_prob - torch.tensor([0.3, -0.3, 0.0, 1e-5]))
        assert not gradients(flow_grpo()(policies, rows).loss.sum(), policies).any()

    def test_zero_advantage_leaves_the_kl_gradient(self):
        policies, rows = toy(advantage=[0.0] * 4, needs={"reference"})
        assert gradients(flow_grpo(beta=0.04)(policies, rows).loss.sum(), policies).abs().max() > 0

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_kl_is_the_formula_and_carries_gradient(self, kernel):
        policies, rows = toy(kernel, steps=[0, 3, 8], advantage=[0.0] * 3, needs={"reference"})
        cells = flow_grpo(beta=0.5)(policies, rows)
        live, reference = policies.live.transition(rows), policies.frozen("reference").transition(rows)
        wanted = ((live.mean - reference.mean) ** 2).mean((1, 2, 3)) / (2 * live.std**2)
        assert (wanted > 0).all()
        torch.testing.assert_close(cells.metrics["kl"], wanted.detach())
        torch.testing.assert_close(gradients(cells.loss.sum(), policies), gradients(0.5 * wanted.sum(), policies))

    def test_kl_pulls_towards_the_reference(self):
        policies, rows = toy(advantage=[0.0] * 4, needs={"reference"})
        loss, descent = flow_grpo(beta=1.0), torch.optim.Adam(policies.live.parameters(), lr=0.05)
        before = loss(policies, rows).loss.sum()
        for _ in range(20):
            descent.zero_grad()
            loss(policies, rows).loss.sum().backward()
            descent.step()
        assert loss(policies, rows).loss.sum() < 0.5 * before

    def test_kl_of_equal_policies_is_zero(self):
        policies, rows = toy(needs={"reference"})
        policies.on_policy("reference")
        assert not flow_grpo(beta=0.04)(policies, rows).metrics["kl"].any()

    def test_reference_is_asked_for_only_with_a_kl_term(self):
        assert flow_grpo(beta=0.0).needs.policies == frozenset()
        assert flow_grpo(beta=0.04).needs.policies == {"reference"}
        policies, rows = toy()
        assert "kl" not in flow_grpo()(policies, rows).metrics

    def test_clip_fraction_counts_rows_that_no_longer_pull(self):
        policies, rows = toy(advantage=[1.0, 1.0, -1.0, -1.0])
        rows = replace(rows, log_prob=rows.log_prob - torch.tensor([0.01, -0.01, 0.01, -0.01]))
        assert flow_grpo()(policies, rows).metrics["clip_fraction"].tolist() == [1, 0, 0, 1]

    def test_metrics_of_a_moved_ratio(self):
        policies, rows = toy(steps=[3])
        rows = replace(rows, log_prob=rows.log_prob - 0.25)
        metrics = flow_grpo()(policies, rows).metrics
        # The log-prob is about -1 in float32, known to 6e-8.
        assert metrics["ratio"].item() == pytest.approx(math.exp(0.25), rel=1e-6)
        assert metrics["approx_kl"].item() == pytest.approx(0.03125, rel=1e-6)
        assert metrics["abs_log_ratio"].item() == pytest.approx(0.25, rel=1e-6)

    def test_a_step_without_noise_trains_nothing_and_is_counted(self):
        policies, rows = toy(KERNELS[1], steps=[9], needs={"reference"})
        cells = flow_grpo(beta=0.04)(policies, rows)
        assert cells.metrics["noiseless"].tolist() == [1]
        assert cells.metrics["kl"].tolist() == [0]
        assert not gradients(cells.loss.sum(), policies).any()

    @pytest.mark.parametrize("steps", [[0], [9]])
    def test_one_step_schedule_and_edges_are_finite(self, steps):
        for kernel in KERNELS:
            policies, rows = toy(kernel, steps=steps, needs={"reference"})
            cells = flow_grpo(beta=0.04)(policies, rows)
            assert torch.isfinite(cells.loss).all()
            assert torch.isfinite(gradients(cells.loss.sum(), policies)).all()
            policies = ToyPolicies(kernel, {"reference"})
            rows = transitions(policies.live, flow_match_sigmas(1, 3.0), [0], [1.0])
            assert torch.isfinite(flow_grpo(beta=0.04)(policies, rows).loss).all()

    def test_published_clip_is_the_default(self):
        assert FlowGRPOOptions().clip == 1e-4

    @pytest.mark.parametrize("options", [{"clip": 0.0}, {"clip": 1.0}, {"beta": -1.0}, {"kl_against": "old"}])
    def test_senseless_options_are_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            FlowGRPOOptions(**options)


def test_distance_is_the_mean_square_over_twice_the_variance():
    mean = torch.tensor([[1.0, 3.0], [1.0, 3.0]], requires_grad=True)
    one = Moments(mean=mean, scale=torch.ones(2), std=torch.tensor([2.0, 0.0]))
    other = Moments(mean=torch.zeros(2, 2), scale=torch.ones(2), std=torch.tensor([2.0, 0.0]))
    got = distance(one, other, one.std)
    assert got.tolist() == [(1 + 9) / 2 / 8, 0]
    (gradient,) = torch.autograd.grad(got.sum(), mean)
    assert torch.equal(gradient, torch.tensor([[1 / 8, 3 / 8], [0, 0]]))


class TestSFT:
    def test_is_the_velocity_error_on_fresh_noise(self):
        policies, rows = ToyPolicies(KERNELS[0]), clean_rows([1.0] * 5)
        loss = SFT(SFTOptions())
        sigma = loss.sigma(rows.x0, rows.seed)
        eps = seeds.normal_like(rows.x0, rows.seed, "sft", "noise")
        s = sigma.reshape(-1, 1, 1, 1)
        v = policies.live.velocity((1 - s) * rows.x0 + s * eps, sigma, rows.conditioning)
        wanted = ((v - (eps - rows.x0)) ** 2).mean((1, 2, 3))
        cells = loss(policies, rows)
        torch.testing.assert_close(cells.loss, wanted)
        torch.testing.assert_close(cells.metrics["mse"], wanted.detach())
        torch.testing.assert_close(cells.metrics["sigma"], sigma)

    def test_the_true_velocity_has_no_loss(self):
        class Oracle:
            def velocity(self, x, sigma, conditioning):
                # x = (1-s) x0 + s eps, so (x - x0)/s = eps - x0.
                return (x - rows.x0) / sigma.reshape(-1, 1, 1, 1)

        class Policies:
            live = Oracle()

        rows = clean_rows([1.0] * 4)
        # Dividing the float32 latent by sigma loses a digit or two.
        assert SFT(SFTOptions())(Policies(), rows).loss.max() < 1e-8

    def test_rows_weigh_by_their_advantage(self):
        policies, rows = ToyPolicies(KERNELS[0]), clean_rows([1.0, 1.0])
        plain = SFT(SFTOptions())(policies, rows).loss
        weighed = SFT(SFTOptions())(policies, replace(rows, advantage=torch.tensor([0.0, 2.0]))).loss
        torch.testing.assert_close(weighed, plain * torch.tensor([0.0, 2.0]))
        assert gradients(weighed[0], policies).abs().max() == 0

    @pytest.mark.parametrize("shift", [1.0, 3.0])
    def test_sigma_distributions(self, shift):
        row_seeds = torch.arange(4000)
        x0 = torch.zeros(4000, 1)
        uniform = SFT(SFTOptions(sampling="uniform", shift=shift)).sigma(x0, row_seeds)
        normal = SFT(SFTOptions(logit_mean=0.5, logit_std=0.8, shift=shift)).sigma(x0, row_seeds)
        for sigma in (uniform, normal):
            assert sigma.shape == (4000,) and sigma.dtype == torch.float32
            assert (sigma >= 0).all() and (sigma <= 1).all()
        # Undo the shift; a mean of 4000 strays by 1/63 of a standard deviation, 4 of those are allowed.
        even = uniform / (shift - (shift - 1) * uniform)
        logit = torch.logit(normal) - math.log(shift)
        assert even.mean().item() == pytest.approx(0.5, abs=4 * 0.289 / 63)
        assert even.std().item() == pytest.approx(12**-0.5, abs=0.01)
        assert logit.mean().item() == pytest.approx(0.5, abs=4 * 0.8 / 63)
        assert logit.std().item() == pytest.approx(0.8, abs=4 * 0.8 / 89)

    def test_sigma_and_noise_are_drawn_apart(self):
        # With a latent of one number, one stream for both would make them equal.
        rows = replace(clean_rows([1.0]), x0=torch.zeros(1, 1))
        noise = seeds.normal_like(rows.x0, rows.seed, "sft", "noise")
        assert torch.sigmoid(noise[0]) != SFT(SFTOptions()).sigma(rows.x0, rows.seed)

    def test_cosmap_weighs_middle_sigmas_twice_as_much_as_the_ends(self):
        sigma = torch.tensor([0.0, 0.5, 1.0])
        weight = SFT(SFTOptions(weighting="cosmap")).weight(sigma)
        torch.testing.assert_close(weight, torch.tensor([2, 4, 2]) / math.pi)
        # It is a density: weighting uniform sigmas by it is sampling from it.
        grid = torch.linspace(0, 1, 1001)
        assert torch.trapezoid(SFT(SFTOptions(weighting="cosmap")).weight(grid), grid).item() == pytest.approx(
            1, abs=1e-5
        )

    def test_weighting_scales_the_loss_and_not_the_metric(self):
        policies, rows = ToyPolicies(KERNELS[0]), clean_rows([1.0] * 3)
        plain, weighed = (SFT(SFTOptions(weighting=name))(policies, rows) for name in ("none", "cosmap"))
        torch.testing.assert_close(plain.metrics["mse"], weighed.metrics["mse"])
        factor = SFT(SFTOptions(weighting="cosmap")).weight(plain.metrics["sigma"])
        torch.testing.assert_close(weighed.loss, plain.loss * factor)

"""nft, awm and dpo: losses on noised samples, and their numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from mdiff_core import seeds
from mdiff_core.kernels.ode import ODE, ODEOptions
from mdiff_core.losses.awm import AWM, AWMOptions
from mdiff_core.losses.dpo import DPO, DPOOptions
from mdiff_core.losses.nft import NFT, NFTOptions
from mdiff_core.types import Samples
from tests.toy_policies import LATENT, UNCONDITIONAL, ToyPolicies, preferences, samples

SIGMA = [1.0, 0.8, 0.3, 0.01]


def nft(**options):
    return NFT(NFTOptions(**options))


def awm(**options):
    return AWM(AWMOptions(**options))


def dpo(**options):
    return DPO(DPOOptions(**options))


def toy(loss, *on_policy):
    return ToyPolicies(ODE(ODEOptions()), loss.needs.policies).on_policy(*on_policy)


def gradients(loss, policies):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policies.live.parameters()))])


class Fixed:
    """Policies of one velocity each."""

    def __init__(self, live, **others):
        self.velocities = {"live": live, **others}
        self.live = self.frozen("live")

    def frozen(self, name):
        value = self.velocities[name]

        class One:
            def velocity(self, x, sigma, conditioning):
                return value.expand_as(x)

        return One()


@pytest.fixture
def eps(monkeypatch):
    """Noise of 0.2 everywhere."""
    monkeypatch.setattr(seeds, "normal_like", lambda x, *_: torch.full_like(x, 0.2))


def rows_of(advantage, x0=1.0, sigma=0.5):
    batch = len(advantage)
    return Samples(
        x0=torch.full((batch, *LATENT), x0),
        sigma=torch.full((batch,), sigma),
        advantage=torch.tensor(advantage),
        conditioning=UNCONDITIONAL,
        seed=torch.arange(batch),
    )


class TestNFT:
    def test_how_good_an_advantage_is(self):
        advantage = torch.tensor([-7.0, -2.5, 0.0, 1.0, 2.5, 5.0])
        torch.testing.assert_close(nft().good(advantage), torch.tensor([0, 0.25, 0.5, 0.6, 0.75, 1]))

    @pytest.mark.parametrize(
        ("mode", "good"),
        [
            ("all", [0.25, 0.5, 0.75]),
            ("positive_only", [0.5, 0.5, 0.75]),
            ("negative_only", [0.25, 0.5, 0.5]),
            ("one_only", [0.5, 0.5, 0.6]),
            ("binary", [0.4, 0.5, 0.6]),
        ],
    )
    def test_advantage_modes(self, mode, good):
        torch.testing.assert_close(nft(advantages=mode).good(torch.tensor([-2.5, 0.0, 2.5])), torch.tensor(good))

    @pytest.mark.parametrize("adaptive", [True, False])
    def test_the_worked_example(self, eps, adaptive):
        v = torch.full((1, *LATENT), -0.5, requires_grad=True)
        policies = Fixed(v, old=v.detach())
        for good, slope in zip([0, 0.25, 0.5, 0.75, 1], [-5, -2.5, 0, 2.5, 5], strict=True):
            loss = nft(adaptive=adaptive)(policies, rows_of([10 * good - 5.0])).loss
            (gradient,) = torch.autograd.grad(loss.sum(), v)
            # The error is 0.15, and so is the adaptive weight's divisor.
            scale = 1 if adaptive else 0.15
            assert loss.item() == pytest.approx(0.75 * scale, rel=1e-6)
            assert gradient.sum().item() == pytest.approx(slope * scale, rel=1e-5, abs=1e-6)

    def test_away_from_the_old_policy_it_is_its_formula(self):
        loss, rows = nft(beta=0.3, c=2.0, kl=0.7), samples([1.0, -1.5, 0.0, 9.0], SIGMA)
        policies = toy(loss)
        eps = seeds.normal_like(rows.x0, rows.seed, "nft", "noise")
        t = rows.sigma.reshape(-1, 1, 1, 1)
        x = (1 - t) * rows.x0 + t * eps
        v, old, ref = (
            policy.velocity(x, rows.sigma, rows.conditioning)
            for policy in (policies.live, policies.others["old"], policies.others["reference"])
        )
        wanted = 0.7 * ((v - ref) ** 2).mean((1, 2, 3))
        r = (rows.advantage / 2).clamp(-1, 1) / 2 + 0.5
        for share, mixed in ((r, 0.3 * v + 0.7 * old), (1 - r, 1.3 * old - 0.3 * v)):
            off = x - t * mixed - rows.x0
            weight = off.detach().abs().mean((1, 2, 3)).clamp(min=1e-5)
            wanted = wanted + 2.0 / 0.3 * share * (off**2).mean((1, 2, 3)) / weight
        cells = loss(policies, rows)
        torch.testing.assert_close(cells.loss, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients(cells.loss.sum(), policies), gradients(wanted.sum(), policies))
        torch.testing.assert_close(cells.metrics["old_gap"], ((v - old) ** 2).mean((1, 2, 3)).detach())

    def test_the_gradient_at_the_old_policy_depends_on_neither_beta_nor_c(self):
        rows = samples([1.0, -2.5, 0.5, 2.0], SIGMA)
        found = []
        for beta in (0.1, 1.0, 2.0):
            for c in (2.5, 5.0, 40.0):
                loss = nft(beta=beta, c=c)
                policies = toy(loss, "old")
                found.append(gradients(loss(policies, rows).loss.sum(), policies))
        assert found[0].abs().max() > 0.1
        for other in found[1:]:
            # beta v + (1-beta) v_old is v only up to rounding, which 1/beta and c enlarge.
            torch.testing.assert_close(other, found[0], rtol=1e-4, atol=2e-5)

    def test_a_sample_predicted_exactly_has_no_infinite_weight(self, eps):
        v = torch.full((1, *LATENT), 0.2 - 1.0, requires_grad=True)
        loss = nft()(Fixed(v, old=v.detach()), rows_of([1.0])).loss
        (gradient,) = torch.autograd.grad(loss.sum(), v)
        assert torch.isfinite(gradient).all() and loss.item() < 1e-6

    def test_needs_the_old_policy_and_samples_without_guidance_unless_asked(self):
        assert nft().needs.policies == {"old"} and not nft().needs.guidance
        assert nft(kl=1e-4).needs.policies == {"old", "reference"}
        assert nft(guided=True).needs.guidance

    @pytest.mark.parametrize(
        "options", [{"beta": 0.0}, {"c": 0.0}, {"timesteps": 0.0}, {"timesteps": 1.1}, {"kl": -1.0}]
    )
    def test_senseless_options_are_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            nft(**options)


class TestAWM:
    @pytest.mark.parametrize(
        ("weighting", "weight"),
        [
            ("uniform", lambda mse, t: mse),
            ("t", lambda mse, t: t * mse),
            ("t2", lambda mse, t: t * t * mse),
            ("huber", lambda mse, t: t * math.sqrt(mse)),
            ("ghuber", lambda mse, t: t * mse**0.25 / 0.25),
        ],
    )
    def test_the_ratio_is_that_of_weighted_matching_errors(self, eps, weighting, weight):
        live, old = torch.full((1, *LATENT), -0.6), torch.full((1, *LATENT), -0.5)
        cells = awm(weighting=weighting)(Fixed(live, old=old), rows_of([2.0]))
        # v - (eps - x0) is 0.2 and 0.3; the root's smoothing of 1e-10 shows in the fifth digit.
        ratio = math.exp(weight(0.3**2, 0.5) - weight(0.2**2, 0.5))
        assert cells.metrics["mse"].item() == pytest.approx(0.04, rel=1e-5)
        assert cells.metrics["ratio"].item() == pytest.approx(ratio, rel=5e-3 if weighting == "ghuber" else 1e-4)
        assert cells.loss.item() == pytest.approx(-2 * min(ratio, 2.0), rel=5e-3)

    def test_on_policy_its_gradient_is_the_advantage_weighted_matching_gradient(self):
        loss, rows = awm(weighting="uniform"), samples([1.0, -2.0, 0.5, 3.0], SIGMA)
        policies = toy(loss, "old")
        eps = seeds.normal_like(rows.x0, rows.seed, "awm", "noise")
        t = rows.sigma.reshape(-1, 1, 1, 1)
        v = policies.live.velocity((1 - t) * rows.x0 + t * eps, rows.sigma, rows.conditioning)
        matching = (rows.advantage * ((v - (eps - rows.x0)) ** 2).mean((1, 2, 3))).sum()
        got = gradients(loss(policies, rows).loss.sum(), policies)
        torch.testing.assert_close(got, gradients(matching, policies))

    def test_the_clip_stops_where_it_should(self, eps):
        live, old = torch.full((1, *LATENT), -0.6, requires_grad=True), torch.full((1, *LATENT), -0.5)
        for advantage, stopped in ((1.0, True), (-1.0, False)):
            cells = awm(weighting="uniform", clip=1e-3)(Fixed(live, old=old), rows_of([advantage]))
            (gradient,) = torch.autograd.grad(cells.loss.sum(), live)
            assert cells.metrics["clip_fraction"].item() == stopped and bool(gradient.any()) != stopped

    @pytest.mark.parametrize("weighting", ["huber", "ghuber"])
    def test_a_perfect_match_has_a_finite_gradient(self, eps, weighting):
        v = torch.full((1, *LATENT), -0.8, requires_grad=True)
        (gradient,) = torch.autograd.grad(
            awm(weighting=weighting)(Fixed(v, old=v.detach()), rows_of([1.0])).loss.sum(), v
        )
        assert torch.isfinite(gradient).all()


class TestDPO:
    def test_is_its_formula_with_one_noise_for_both(self):
        loss, rows = dpo(beta=20.0), preferences(SIGMA)
        policies = toy(loss)
        eps = seeds.normal_like(rows.better, rows.seed, "dpo", "noise")
        t = rows.sigma.reshape(-1, 1, 1, 1)

        def error(policy, x0):
            v = policy.velocity((1 - t) * x0 + t * eps, rows.sigma, rows.conditioning)
            return ((v - (eps - x0)) ** 2).mean((1, 2, 3))

        gap = [error(policies.live, x0) - error(policies.others["reference"], x0) for x0 in (rows.better, rows.worse)]
        cells = loss(policies, rows)
        torch.testing.assert_close(cells.loss, -logsigmoid(-10.0 * (gap[0] - gap[1])))
        assert cells.metrics["accuracy"].tolist() == (gap[0] < gap[1]).float().tolist()

    def test_at_the_reference_it_is_log_two_and_prefers_nobody(self):
        loss = dpo()
        cells = loss(toy(loss, "reference"), preferences(SIGMA))
        torch.testing.assert_close(cells.loss, torch.full((4,), math.log(2)))
        assert not cells.metrics["margin"].any() and not cells.metrics["accuracy"].any()

    def test_training_makes_it_prefer_the_better_one(self):
        loss, rows = dpo(beta=50.0), preferences(SIGMA)
        policies = toy(loss, "reference")
        descent = torch.optim.Adam(policies.live.parameters(), lr=0.05)
        for _ in range(30):
            descent.zero_grad()
            loss(policies, rows).loss.sum().backward()
            descent.step()
        assert loss(policies, rows).metrics["accuracy"].all()

    def test_exchanging_better_and_worse_turns_the_gradient_around(self):
        loss, rows = dpo(), preferences(SIGMA)
        policies = toy(loss, "reference")
        turned = replace(rows, better=rows.worse, worse=rows.better)
        one, other = (gradients(loss(policies, each).loss.sum(), policies) for each in (rows, turned))
        torch.testing.assert_close(one, -other)

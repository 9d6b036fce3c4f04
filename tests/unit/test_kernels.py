import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mdiff_core.errors import BadSetting
from mdiff_core.kernels.cps import CPS, CPSOptions
from mdiff_core.kernels.dance_sde import DanceSDE, DanceSDEOptions
from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.kernels.ode import ODE, ODEOptions
from mdiff_core.sigmas import flow_match_sigmas

SIGMAS = flow_match_sigmas(10, 3.0)
UNIT = st.floats(0.01, 0.99)
NUMBER = st.floats(-3, 3, width=32)


def flow(eta):
    return FlowSDE(FlowSDEOptions(eta=eta))


def dance(eta):
    return DanceSDE(DanceSDEOptions(eta=eta))


def cps(eta):
    return CPS(CPSOptions(eta=eta))


def moments(kernel, x, v, sigma, sigma_next, ceiling=0.96):
    """Of one row with a latent of one number, or of as many rows as `x` has."""
    rows = torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1)
    column = [torch.full((len(rows),), float(value)) for value in (sigma, sigma_next, ceiling)]
    return kernel.moments(rows, torch.as_tensor(v, dtype=torch.float32).expand(len(rows), 1), *column)


class TestFlowSDE:
    def test_first_step_uses_the_second_sigma_as_ceiling(self):
        got = moments(flow(0.7), 0.5, -1, SIGMAS[0], SIGMAS[1], SIGMAS[1])
        assert got.std.item() == pytest.approx(3.50567108, rel=1e-6)
        assert got.scale.item() == pytest.approx(0.7, rel=1e-6)

    def test_step_eight_of_ten(self):
        got = moments(flow(0.7), 0.5, -1, SIGMAS[8], SIGMAS[9], SIGMAS[1])
        assert got.std.item() == pytest.approx(0.434415, abs=5e-7)
        assert got.scale.item() == pytest.approx(0.22536, abs=5e-6)

    def test_worked_example(self):
        kernel = flow(0.7)
        got = moments(kernel, 0.5, -1, 0.8, 0.6)
        x_next = kernel.step(torch.tensor([[0.5]]), got, torch.ones(1, 1))
        assert got.std.item() == pytest.approx(1.4, rel=1e-6)
        assert got.mean.item() == pytest.approx(0.6265, rel=1e-6)
        assert got.scale.item() == pytest.approx(0.62609903, rel=1e-6)
        assert kernel.log_prob(x_next, got).item() == pytest.approx(-0.95069181, rel=1e-6)

    def test_a_first_sigma_rounded_below_one_counts_as_one(self):
        exact = moments(flow(0.7), 0.5, -1, 1.0, SIGMAS[1], SIGMAS[1])
        rounded = moments(flow(0.7), 0.5, -1, 1 - 2**-24, SIGMAS[1], SIGMAS[1])
        assert rounded.std.item() == pytest.approx(exact.std.item(), rel=1e-6)

    def test_one_step_schedule(self):
        sigmas = flow_match_sigmas(1, 3.0)
        got = moments(flow(0.7), 0.5, -1, sigmas[0], sigmas[1], sigmas[1])
        assert got.scale.item() == pytest.approx(0.7)
        assert math.isfinite(got.mean.item())

    @pytest.mark.parametrize("eta", [0.0, -0.1])
    def test_refuses_to_be_an_ode(self, eta):
        with pytest.raises(ValidationError, match="eta"):
            FlowSDEOptions(eta=eta)


class TestDanceSDE:
    @pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.5, 0.4), (0.01, 0.0)])
    def test_diffusion_is_eta_everywhere(self, sigma, sigma_next):
        got = moments(dance(0.3), 0.5, -1, sigma, sigma_next)
        assert got.std.item() == pytest.approx(0.3)
        assert got.scale.item() == pytest.approx(0.3 * math.sqrt(sigma - sigma_next))

    @given(x=NUMBER, v=NUMBER, sigma=UNIT, share=UNIT)
    def test_is_flow_sde_where_the_diffusions_agree(self, x, v, sigma, share):
        ours = moments(dance(0.7 * math.sqrt(sigma / (1 - sigma))), x, v, sigma, sigma * share)
        theirs = moments(flow(0.7), x, v, sigma, sigma * share)
        # Both work in float32 on numbers up to 50.
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-4, atol=1e-4)


class TestCPS:
    @given(x=NUMBER, v=NUMBER, sigma=UNIT, share=UNIT, eta=st.floats(0, 1))
    def test_formula(self, x, v, sigma, share, eta):
        after = sigma * share
        std = after * math.sin(eta * math.pi / 2)
        mean = (1 - after) * (x - sigma * v) + math.sqrt(max(after**2 - std**2, 0)) * (x + (1 - sigma) * v)
        got = moments(cps(eta), x, v, sigma, after)
        assert got.std.item() == pytest.approx(std, abs=1e-6)
        assert got.scale.item() == got.std.item()
        assert got.mean.item() == pytest.approx(mean, abs=1e-5)

    def test_log_prob_leaves_out_variance_and_constants(self):
        kernel = cps(0.8)
        got = moments(kernel, 0.5, -1, 0.8, 0.6)
        x_next = kernel.step(torch.zeros(1, 1), got, torch.tensor([[2.0]]))
        assert kernel.log_prob(x_next, got).item() == pytest.approx(-((2 * 0.6 * math.sin(0.4 * math.pi)) ** 2))

    @given(sigma=UNIT, share=UNIT, eta=st.floats(0, 1))
    def test_the_noise_in_the_next_latent_is_what_its_sigma_says(self, sigma, share, eta):
        # With x0 = 0 and eps = 1: x = sigma, v = 1. Carried and fresh noise have variances that sum to sigma_next^2.
        got = moments(cps(eta), sigma, 1.0, sigma, sigma * share)
        assert got.mean.item() ** 2 + got.scale.item() ** 2 == pytest.approx((sigma * share) ** 2, abs=1e-5)

    @pytest.mark.parametrize("eta", [0.0, 0.8, 1.0])
    def test_last_step_has_no_noise_and_a_finite_log_prob(self, eta):
        kernel = cps(eta)
        got = moments(kernel, 0.5, -1, 0.3, 0.0)
        x_next = kernel.step(torch.zeros(1, 1), got, torch.ones(1, 1))
        assert got.scale.item() == 0
        assert x_next.item() == got.mean.item() == pytest.approx(0.5 + 0.3)
        assert kernel.log_prob(x_next, got).item() == 0

    @pytest.mark.parametrize("eta", [-0.01, 1.01])
    def test_refuses_eta_outside_the_unit_interval(self, eta):
        with pytest.raises(ValidationError, match="eta"):
            CPSOptions(eta=eta)


def test_ode_is_eulers_step_and_has_no_log_prob():
    kernel = ODE(ODEOptions())
    got = moments(kernel, 0.5, -1, 0.8, 0.6)
    assert kernel.step(torch.zeros(1, 1), got, torch.ones(1, 1)).item() == pytest.approx(0.7)
    with pytest.raises(BadSetting, match="ode"):
        kernel.log_prob(torch.zeros(1, 1), got)


@pytest.mark.parametrize("kernel", [flow(0.7), flow(1.2), dance(0.3), dance(1.0)])
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.96), (0.8, 0.6), (0.278, 0.009), (0.009, 0.0)])
def test_density_integrates_to_one(kernel, sigma, sigma_next):
    got = moments(kernel, 0.5, -1, sigma, sigma_next)
    grid = got.mean.item() + got.scale.item() * torch.linspace(-8, 8, 2001)
    each = moments(kernel, torch.full((2001,), 0.5), -1, sigma, sigma_next)
    density = kernel.log_prob(grid[:, None], each).double().exp()
    # float32 log-densities of up to 30 carry 2e-6 of relative error, the grid itself as much again.
    assert torch.trapezoid(density, grid.double()).item() == pytest.approx(1.0, abs=2e-5)


def marginal(sigma, mean, variance):
    """Of x_sigma when x0 ~ N(mean, variance): its mean and variance."""
    return (1 - sigma) * mean, (1 - sigma) ** 2 * variance + sigma**2


def exact_velocity(x, sigma, mean, variance):
    """E[eps - x0 | x_sigma = x] for the same data."""
    centre, spread = marginal(sigma, mean, variance)
    return (sigma - (1 - sigma) * variance) / spread * (x - centre) - mean


@pytest.mark.parametrize("kernel", [flow(0.7), dance(0.5)])
def test_small_steps_keep_the_flows_marginals(kernel):
    # Each step is affine in x, so two probes tell how it carries a Gaussian's mean and variance.
    data = (0.7, 0.25)
    sigmas = torch.linspace(0.95, 0, 3001)
    centre, spread = marginal(0.95, *data)
    for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        x = torch.tensor([[0.0], [1.0]])
        got = moments(kernel, x, exact_velocity(x, sigma, *data), sigma, sigma_next)
        at_zero, at_one = got.mean.flatten().tolist()
        centre = at_zero + (at_one - at_zero) * centre
        spread = (at_one - at_zero) ** 2 * spread + got.scale[0].item() ** 2
    # Euler's error falls as 1/steps; at 3000 it is below a percent.
    assert centre == pytest.approx(data[0], rel=0.01)
    assert spread == pytest.approx(data[1], rel=0.01)

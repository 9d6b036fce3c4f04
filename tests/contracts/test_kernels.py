"""What every kernel of the registry must do, whatever its formula."""

import pytest
import torch

from mdiff_core.contracts import Kernel
from mdiff_core.errors import BadSetting
from mdiff_core.kernels.ode import ODE, ODEOptions
from mdiff_core.options import Choice, Options
from mdiff_core.registry import REGISTRY, find, make
from mdiff_core.sigmas import flow_match_sigmas

NAMES = sorted(REGISTRY["kernel"])
STOCHASTIC = [name for name in NAMES if find("kernel", name).stochastic]
LATENT = (2, 3, 3)


@pytest.fixture(params=[(10, 3.0), (10, 1.0), (2, 3.0), (1, 3.0)], ids=lambda schedule: f"{schedule[0]}x{schedule[1]}")
def cells(request):
    """x, v, noise and the sigmas of every step of a schedule, the first (sigma 1) and last (to 0) included."""
    sigmas = flow_match_sigmas(*request.param)
    draw = torch.Generator().manual_seed(1)
    x, v, noise = (torch.randn(len(sigmas) - 1, *LATENT, generator=draw) for _ in range(3))
    return x, v, noise, (sigmas[:-1], sigmas[1:], sigmas[1].expand(len(sigmas) - 1))


def kernel(name, **options):
    return make("kernel", Choice(name=name, options=options))


@pytest.mark.parametrize("name", NAMES)
class TestEveryKernel:
    def test_is_a_kernel_with_strict_options(self, name):
        assert isinstance(kernel(name), Kernel)
        assert issubclass(find("kernel", name).Options, Options)

    def test_moments_are_finite_float32_of_the_right_shape(self, name, cells):
        x, v, _, sigmas = cells
        moments = kernel(name).moments(x, v, *sigmas)
        assert moments.mean.shape == x.shape
        assert moments.scale.shape == moments.std.shape == sigmas[0].shape
        for part in (moments.mean, moments.scale, moments.std):
            assert part.dtype == torch.float32
            assert torch.isfinite(part).all()
        assert (moments.scale >= 0).all()

    def test_step_is_mean_plus_scaled_noise(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)
        moments = one.moments(x, v, *sigmas)
        assert torch.equal(one.step(x, moments, torch.zeros_like(x)), moments.mean)
        wanted = moments.mean + moments.scale.reshape(-1, 1, 1, 1) * noise
        torch.testing.assert_close(one.step(x, moments, noise), wanted)

    def test_a_row_does_not_depend_on_its_batch(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)
        whole = one.step(x, one.moments(x, v, *sigmas), noise)
        for i in reversed(range(len(x))):
            moments = one.moments(x[i : i + 1], v[i : i + 1], *(column[i : i + 1] for column in sigmas))
            assert torch.equal(one.step(x[i : i + 1], moments, noise[i : i + 1])[0], whole[i])

    def test_mean_carries_gradient_to_the_velocity(self, name, cells):
        x, v, _, sigmas = cells
        v = v.requires_grad_()
        (gradient,) = torch.autograd.grad(kernel(name).moments(x, v, *sigmas).mean.sum(), v)
        assert torch.isfinite(gradient).all()
        assert (gradient.flatten(1).abs().sum(1) > 0).all()


@pytest.mark.parametrize("name", STOCHASTIC)
class TestStochasticKernels:
    def test_log_prob_of_a_step_is_finite_and_one_number_a_row(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)
        moments = one.moments(x, v, *sigmas)
        log_prob = one.log_prob(one.step(x, moments, noise), moments)
        assert log_prob.shape == sigmas[0].shape and log_prob.dtype == torch.float32
        assert torch.isfinite(log_prob).all()

    def test_step_then_log_prob_agree(self, name, cells):
        # The log-prob of what was drawn depends on the noise alone, as -z^2 (times 1/2, or the variance) does.
        x, v, noise, sigmas = cells
        one = kernel(name)
        moments = one.moments(x, v, *sigmas)
        peak = one.log_prob(moments.mean, moments)
        fall = peak - one.log_prob(one.step(x, moments, noise), moments)
        double = peak - one.log_prob(one.step(x, moments, 2 * noise), moments)
        noisy = moments.scale > 0
        assert (fall[noisy] > 0).all()
        # x_next and mean are float32 numbers of size 3, their difference may be 0.01: 1e-4 of it is rounding.
        torch.testing.assert_close(double, 4 * fall, rtol=1e-3, atol=1e-5)
        assert torch.equal(fall[~noisy], torch.zeros_like(fall[~noisy]))

    def test_log_prob_is_a_mean_over_the_latent(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)

        def log_prob(repeats):
            wide = [part.repeat(1, repeats, 1, 1) for part in (x, v, noise)]
            moments = one.moments(wide[0], wide[1], *sigmas)
            return one.log_prob(one.step(wide[0], moments, wide[2]), moments)

        torch.testing.assert_close(log_prob(3), log_prob(1))

    @pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.96), (0.8, 0.6), (0.3, 0.01)])
    def test_says_whether_its_density_integrates_to_one(self, name, sigma, sigma_next):
        one = kernel(name)
        columns = [torch.full((2001,), value) for value in (sigma, sigma_next, 0.96)]
        moments = one.moments(torch.full((2001, 1), 0.5), torch.full((2001, 1), -1.0), *columns)
        grid = moments.mean[0] + moments.scale[0] * torch.linspace(-8, 8, 2001)
        density = one.log_prob(grid[:, None], moments).double().exp()
        # float32 log-densities, and the grid's ends.
        integral = torch.trapezoid(density, grid.double()).item()
        assert (abs(integral - 1) < 1e-4) == find("kernel", name).normalised

    def test_log_prob_carries_gradient_where_there_is_noise(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)
        with torch.no_grad():
            drawn = one.step(x, one.moments(x, v, *sigmas), noise)
        v = v.clone().requires_grad_()
        moments = one.moments(x, v, *sigmas)
        (gradient,) = torch.autograd.grad(one.log_prob(drawn, moments).sum(), v)
        assert torch.isfinite(gradient).all()
        assert ((gradient.flatten(1).abs().sum(1) > 0) == (moments.scale > 0)).all()

    def test_tends_to_the_ode_as_its_noise_vanishes(self, name, cells):
        x, v, noise, sigmas = cells
        ode = ODE(ODEOptions())
        wanted = ode.step(x, ode.moments(x, v, *sigmas), noise)
        distance = []
        for eta in (0.1, 0.01, 1e-5):
            one = kernel(name, eta=eta)
            distance.append((one.step(x, one.moments(x, v, *sigmas), noise) - wanted).abs().max().item())
        assert distance[0] >= distance[1] >= distance[2]
        # Noise is at most 5 sigma * 1e-5 * eta's factor (below 4); the rest is float32.
        assert distance[2] < 2e-4

    def test_unknown_option_is_refused(self, name):
        with pytest.raises(ValueError, match="etta"):
            kernel(name, etta=0.5)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(STOCHASTIC)))
class TestDeterministicKernels:
    def test_noise_plays_no_part(self, name, cells):
        x, v, noise, sigmas = cells
        one = kernel(name)
        moments = one.moments(x, v, *sigmas)
        assert torch.equal(one.step(x, moments, noise), moments.mean)
        assert not moments.scale.any()

    def test_there_is_no_density(self, name, cells):
        x, v, _, sigmas = cells
        one = kernel(name)
        with pytest.raises(BadSetting, match=name):
            one.log_prob(x, one.moments(x, v, *sigmas))

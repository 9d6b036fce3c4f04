import pytest
import torch

from mdiff_core.errors import BadSetting
from mdiff_core.sigmas import flow_match_sigmas, shifted

SD3_TEN_STEPS = [1, 0.96012931, 0.91334895, 0.85769231, 0.79036827, 0.70727848, 0.60215054, 0.46487603, 0.27804878]
SD3_TEN_STEPS += [0.00892857, 0]


def test_sd3_schedule_of_ten_steps():
    sigmas = flow_match_sigmas(10, 3.0)
    assert sigmas.dtype == torch.float32
    # The published digits are eight, and float32 adds 3e-8 near 1.
    torch.testing.assert_close(sigmas.double(), torch.tensor(SD3_TEN_STEPS, dtype=torch.float64), rtol=0, atol=3.5e-8)


@pytest.mark.parametrize("shift", [1.0, 1.5, 3, 3.0, 0.5, 12.7])
def test_bit_for_bit_the_schedule_of_diffusers(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in [*range(1, 60), 100, 1000]:
        scheduler.set_timesteps(steps)
        assert torch.equal(flow_match_sigmas(steps, shift), scheduler.sigmas), steps


@pytest.mark.parametrize("steps", [1, 2, 10, 999])
@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0, 7.3])
def test_falls_from_one_to_zero(steps, shift):
    sigmas = flow_match_sigmas(steps, shift)
    assert sigmas.shape == (steps + 1,)
    assert (sigmas.diff() < 0).all()
    assert sigmas[-1] == 0
    # Rounding in float32 may leave the first sigma one unit below 1; the kernels count that as 1.
    assert sigmas[0] == pytest.approx(1.0, abs=1.2e-7)


def test_shift_keeps_the_ends_and_order_and_is_undone_by_its_inverse():
    sigma = torch.linspace(0, 1, 101, dtype=torch.float64)
    moved = shifted(sigma, 3.0)
    assert moved[0] == 0 and moved[-1] == 1
    assert (moved.diff() > 0).all()
    assert (moved[1:-1] > sigma[1:-1]).all()
    assert torch.equal(shifted(sigma, 1.0), sigma)
    torch.testing.assert_close(shifted(moved, 1 / 3.0), sigma)


@pytest.mark.parametrize(("steps", "shift", "field"), [(0, 3.0, "steps"), (-1, 3.0, "steps"), (4, 0.0, "shift")])
def test_refuses_what_is_no_schedule(steps, shift, field):
    with pytest.raises(BadSetting, match=field):
        flow_match_sigmas(steps, shift)


def test_refuses_a_shift_that_is_no_number():
    with pytest.raises(BadSetting, match="shift"):
        flow_match_sigmas(4, float("nan"))

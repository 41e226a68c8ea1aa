"""Policies are made by name; what is wrong with a name or an option is said completely."""

import pytest

from scheduling.registry import POLICIES, make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_carries_its_name(name):
    """The registry's name and the policy's own agree, and required options are enough."""
    required = {key: 8 for key, option in POLICIES[name].options.items() if option.required}
    assert make_policy(name, **required).name == name


def test_unknown_policy_lists_the_valid_ones():
    """A misspelt policy is answered with the nearest one and all valid names."""
    with pytest.raises(ValueError, match="did you mean 'halo-paper'") as caught:
        make_policy("halo-papr", batch=4)
    for name in POLICIES:
        assert name in str(caught.value)


def test_every_fault_of_the_options_is_listed():
    """Unknown, missing and wrong options come in one error."""
    with pytest.raises(ValueError, match="unknown option 'bath'") as caught:
        make_policy("qoserve", bath=4, tbt_min_us="50ms")
    message = str(caught.value)
    assert "did you mean 'batch'?" in message
    assert "option batch is missing" in message
    assert "tbt_min_us must be a whole number, got '50ms'" in message


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, None, "4"])
def test_batch_must_be_a_positive_whole_number(batch):
    """No value slips through that would make a policy plan nothing."""
    with pytest.raises(ValueError, match="option batch must be"):
        make_policy("fcfs", batch=batch)

"""vllm_plugin.lora_overlap: the table decides, outputs equal the sequential path's. Threads stand for streams here."""

from types import SimpleNamespace

import pytest
import torch
import vllm.envs
from vllm.lora.layers import LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.platforms import current_platform

import deployments.lora_overlap
from partition.configs import Split, Unsplit
from partition.search_result import Verdict
from partition.table import Entry, PartitionTable, TableKey, to_text
from tests.fakes.side_by_side import ThreadedSideBySide
from vllm_plugin import compat, lora_overlap
from vllm_plugin.cpu_lora import GroupedPunicaWrapper
from vllm_plugin.lora_overlap import LoraOverlap

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="threads stand for streams on a CPU")

RANK, SLOTS, SIZE_IN, SLICES = 16, 4, 96, (64, 32, 32)
SPLIT = Split(96, 24)


def table(**choices: Split | Unsplit) -> PartitionTable:
    """Entries for 8 rows of the named groups; a split takes 20 us, sequential 25, dual stream 22."""
    key = TableKey("fake", 132, 2, "1", "m", 1, (RANK,), SLOTS, "0.32.0")
    entries = tuple(
        Entry(group, RANK, 8, choice, Verdict.CLEAR, 20.0, 25.0, 22.0, 5) for group, choice in choices.items()
    )
    return PartitionTable(key, entries)


def layer(ids, prefix="model.layers.0.self_attn.qkv_proj"):
    """A LoRA linear layer with four adapters, on vLLM's own methods."""
    torch.manual_seed(0)
    weight = torch.randn(sum(SLICES), SIZE_IN, dtype=torch.bfloat16) * 0.05
    config = SimpleNamespace(max_lora_rank=RANK, max_loras=SLOTS, specialize_active_lora=False)
    wrapper = GroupedPunicaWrapper(64, 64, "cpu", lora_config=config)
    wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids)), [1, 2, 3, 4], SLOTS, 1000)
    method = SimpleNamespace(apply=lambda base, x, bias: torch.nn.functional.linear(x, weight, bias))
    made = SimpleNamespace(
        base_layer=SimpleNamespace(prefix=prefix, quant_method=method),
        device=torch.device("cpu"),
        output_slices=SLICES,
        punica_wrapper=wrapper,
        lora_a_stacked=tuple(torch.randn(SLOTS, 1, RANK, SIZE_IN, dtype=torch.bfloat16) * 0.1 for _ in SLICES),
        lora_b_stacked=tuple(torch.randn(SLOTS, 1, out, RANK, dtype=torch.bfloat16) * 0.1 for out in SLICES),
    )
    for name in ("_get_quant_method", "_apply_sync", "_apply_lora_to_output"):
        setattr(made, name, getattr(BaseLinearLayerWithLoRA, name).__get__(made))
    return made


def stock(*_):
    raise AssertionError("the plain dual stream is not to run")


@pytest.mark.parametrize("ids", [(1, 2, 3, 4, 4, 3, 2), (2,) * 8, (3,)])
@pytest.mark.parametrize("batched", [False, True])
@torch.no_grad()
def test_outputs_equal_the_sequential_path(ids, batched):
    """Base and LoRA side by side give what one after the other gives, within a rounding of the sum to bfloat16."""
    linear, side = layer(ids), ThreadedSideBySide()
    x = torch.randn(len(ids), SIZE_IN, dtype=torch.bfloat16)
    x = x.unsqueeze(0) if batched else x
    bias = torch.randn(sum(SLICES), dtype=torch.bfloat16)
    expected = linear._apply_sync(x, bias)
    base_alone = linear.base_layer.quant_method.apply(None, x, bias)
    got = LoraOverlap(table(qkv=SPLIT), side, stock).apply(linear, x, bias)
    assert side.ran == [SPLIT]
    assert got.shape == expected.shape
    assert (expected - base_alone).abs().max() > 0.05
    rounding = torch.finfo(torch.bfloat16).eps * expected.abs().max()
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=2 * float(rounding))


@torch.no_grad()
def test_rows_without_an_adapter_equal_the_base_model():
    """Beside rows with an adapter, the base model's rows come out exactly as without LoRA."""
    linear, side = layer((1, 0, 2, 0)), ThreadedSideBySide()
    x = torch.randn(4, SIZE_IN, dtype=torch.bfloat16)
    got = LoraOverlap(table(qkv=SPLIT), side, stock).apply(linear, x)
    assert torch.equal(got[[1, 3]], linear.base_layer.quant_method.apply(None, x, None)[[1, 3]])


@pytest.mark.parametrize(
    ("choices", "rows", "prefix"),
    [
        ({"qkv": SPLIT}, 9, "m.qkv_proj"),
        ({"qkv": Unsplit.SEQUENTIAL}, 4, "m.qkv_proj"),
        ({"o": SPLIT}, 4, "m.qkv_proj"),
        ({"qkv": SPLIT}, 4, "m.lm_head"),
        ({}, 4, "m.qkv_proj"),
    ],
)
@torch.no_grad()
def test_elsewhere_it_is_sequential(choices, rows, prefix):
    """More rows than were searched, another group or layer, or a table that says so: vLLM's own sequential path."""
    linear, side = layer((1,) * rows, prefix), ThreadedSideBySide()
    x = torch.randn(rows, SIZE_IN, dtype=torch.bfloat16)
    got = LoraOverlap(table(**choices), side, stock).apply(linear, x)
    assert torch.equal(got, linear._apply_sync(x))
    assert side.ran == []


def test_plain_dual_stream_is_vllms_own():
    """Where the table says dual stream, vLLM's own method runs."""
    linear = layer((1,))
    seen = []
    overlap = LoraOverlap(
        table(qkv=Unsplit.DUAL_STREAM), ThreadedSideBySide(), lambda *given: seen.append(given) or torch.zeros(1)
    )
    overlap.apply(linear, torch.zeros(1, SIZE_IN, dtype=torch.bfloat16))
    assert seen[0][0] is linear


@torch.no_grad()
def test_a_failing_driver_means_sequential_and_says_so():
    """When streams cannot be made, serving goes on one after the other, and the state says why."""
    linear, side = layer((1, 2)), ThreadedSideBySide(failure=RuntimeError("no green contexts"))
    overlap = LoraOverlap(table(qkv=SPLIT), side, stock)
    x = torch.randn(2, SIZE_IN, dtype=torch.bfloat16)
    assert torch.equal(overlap.apply(linear, x), linear._apply_sync(x))
    assert overlap.state == "off: RuntimeError: no green contexts"


@torch.no_grad()
def test_streams_are_never_made_while_a_graph_is_captured():
    """During capture without streams the layer stays sequential; outside of it they are made."""
    linear, side = layer((1, 2)), ThreadedSideBySide(capturing=True)
    overlap = LoraOverlap(table(qkv=SPLIT), side, stock)
    x = torch.randn(2, SIZE_IN, dtype=torch.bfloat16)
    overlap.apply(linear, x)
    assert side.prepared == frozenset()
    side.capturing = False
    overlap.apply(linear, x)
    assert (side.prepared, side.ran) == (frozenset({SPLIT}), [SPLIT])


def test_it_is_not_installed_on_a_cpu(monkeypatch, tmp_path):
    """Even with a table, a CPU engine keeps vLLM's methods."""
    path = tmp_path / "table.json"
    path.write_text(to_text(table(qkv=SPLIT)))
    monkeypatch.setenv(lora_overlap.TABLE_VARIABLE, str(path))
    before = BaseLinearLayerWithLoRA._apply_async_impl
    assert lora_overlap.install_lora_overlap().startswith("not used on a CPU")
    assert BaseLinearLayerWithLoRA._apply_async_impl is before


@pytest.mark.parametrize("content", [None, "{", "dual stream off"])
def test_what_keeps_it_off_is_named(monkeypatch, tmp_path, content):
    """No table, a damaged one, or vLLM's switch: each is a reason, none an exception."""
    monkeypatch.setattr(lora_overlap, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setenv(lora_overlap.DUAL_STREAM_VARIABLE, "0" if content == "dual stream off" else "1")
    path = tmp_path / "table.json"
    if content is None:
        monkeypatch.delenv(lora_overlap.TABLE_VARIABLE, raising=False)
    else:
        path.write_text(content)
        monkeypatch.setenv(lora_overlap.TABLE_VARIABLE, str(path))
    assert lora_overlap.install_lora_overlap().startswith("off: ")


def test_it_installs_once_where_there_is_a_gpu_and_a_table(monkeypatch, tmp_path):
    """On a GPU with a table the layers' method is replaced, once."""
    path = tmp_path / "table.json"
    path.write_text(to_text(table(qkv=SPLIT)))
    monkeypatch.setattr(lora_overlap, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(lora_overlap, "_installed", None)
    monkeypatch.setattr(
        BaseLinearLayerWithLoRA, "_apply_async_impl", BaseLinearLayerWithLoRA._apply_async_impl
    )  # put back afterwards
    monkeypatch.setenv(lora_overlap.DUAL_STREAM_VARIABLE, "1")
    monkeypatch.setenv(lora_overlap.TABLE_VARIABLE, str(path))
    assert lora_overlap.install_lora_overlap().startswith("active: 1 SM splits")
    replaced = BaseLinearLayerWithLoRA._apply_async_impl
    lora_overlap.install_lora_overlap()
    assert BaseLinearLayerWithLoRA._apply_async_impl is replaced


def test_replica_and_workers_name_the_same_variables():
    """What the replica sets is what the plug-in and vLLM read."""
    assert deployments.lora_overlap.TABLE_VARIABLE == lora_overlap.TABLE_VARIABLE
    assert deployments.lora_overlap.DUAL_STREAM_VARIABLE == lora_overlap.DUAL_STREAM_VARIABLE
    assert lora_overlap.DUAL_STREAM_VARIABLE in vllm.envs.environment_variables


def test_the_interface_is_the_known_one(monkeypatch):
    """What is called and replaced in vLLM is there; a change is named."""
    compat.check_overlap_interface()
    monkeypatch.setattr(BaseLinearLayerWithLoRA, "_apply_sync", lambda self, x: x)
    with pytest.raises(compat.UpstreamChangedError, match="_apply_sync takes self, x, not self, x, bias"):
        compat.check_overlap_interface()

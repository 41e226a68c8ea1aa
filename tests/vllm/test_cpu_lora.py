"""vllm_plugin.cpu_lora: LoRA products on the CPU equal the definition, and no row gets another row's adapter."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

import vllm_plugin
from vllm_plugin import compat, cpu_gemm, cpu_lora, cpu_lora_ops, status
from vllm_plugin.cpu_lora import GroupedPunicaWrapper

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU platform's LoRA")

SLOTS, MAX_RANK, VOCAB = 5, 32, 1000
QKV = (576, (576, 192, 192))
GATE_UP = (576, (1536, 1536))
DOWN = (1536, (576,))
# The adapter id of each row; 0 is the base model. Id i sits in slot i - 1, rank RANKS[i - 1].
RANKS = (8, 16, 32, 8)
BATCHES = {
    "one decode": (3,),
    "decodes of one adapter": (2,) * 6,
    "sixteen decodes": (1, 2, 3, 4) * 4,
    "decodes with base rows": (1, 0, 2, 0, 0, 3, 4, 0),
    "base rows around": (0, 0, 1, 2, 0),
    "base rows only": (0, 0, 0),
    "prefill": (2,) * 200,
    "base prefill, LoRA decodes": (1, *(0,) * 200, 2),
    "decodes, then chunks": (1, 2, 0, 4, *(3,) * 120, *(0,) * 40, *(1,) * 70),
    "mixed, many rows": (1, 2, 3, 0, 4) * 20,
}


class Layer(SimpleNamespace):
    """A linear layer's stacked adapters, written by vLLM's own ``set_lora`` and ``reset_lora``."""

    def __init__(self, shape, dtype=torch.bfloat16, rank=MAX_RANK):
        size_in, out_sizes = shape
        super().__init__(
            size_in=size_in,
            output_slices=out_sizes,
            n_slices=len(out_sizes),
            tp_size=1,
            lora_a_stacked=tuple(torch.zeros(SLOTS, 1, rank, size_in, dtype=dtype) for _ in out_sizes),
            lora_b_stacked=tuple(torch.zeros(SLOTS, 1, out, rank, dtype=dtype) for out in out_sizes),
        )
        self.reset_lora = partial(MergedColumnParallelLinearWithLoRA.reset_lora, self)
        self.set_lora = partial(MergedColumnParallelLinearWithLoRA.set_lora, self)

    def load(self, slot, rank, missing=(), scale=1.0):
        """Put a random adapter into ``slot``; slices in ``missing`` are untouched, as for one of q and v only."""
        a = [torch.randn(rank, self.size_in) * 0.04 * scale for _ in self.output_slices]
        b = [torch.randn(out, rank) * 0.05 for out in self.output_slices]
        gone = [index in missing for index in range(self.n_slices)]
        self.set_lora(
            slot,
            [None if out else matrix for matrix, out in zip(a, gone, strict=True)],
            [None if out else matrix for matrix, out in zip(b, gone, strict=True)],
        )

    def delta(self, x, slots):
        """The definition in float32: B A x of each row's adapter, zero without one."""
        rows = torch.tensor(slots, dtype=torch.long)
        result = torch.zeros(len(slots), sum(self.output_slices))
        for slot in set(slots) - {-1}:
            own = rows == slot
            result[own] = torch.cat(
                [
                    x[own].float() @ a[slot, 0].float().T @ b[slot, 0].float().T
                    for a, b in zip(self.lora_a_stacked, self.lora_b_stacked, strict=True)
                ],
                dim=1,
            )
        return result


def loaded_layer(shape, missing=None, dtype=torch.bfloat16):
    torch.manual_seed(7)
    layer = Layer(shape, dtype)
    for slot, rank in enumerate(RANKS):
        layer.load(slot, rank, (missing or {}).get(slot, ()))
    return layer


def wrapper_for(cls, ids, prompt_ids=None, slot_ids=(1, 2, 3, 4, None), prefill=True):
    wrapper = cls(512, 128, torch.device("cpu"), lora_config=SimpleNamespace(max_lora_rank=MAX_RANK))
    map_rows(wrapper, ids, prompt_ids, slot_ids, prefill)
    return wrapper


def map_rows(wrapper, ids, prompt_ids=None, slot_ids=(1, 2, 3, 4, None), prefill=True):
    mapping = LoRAMapping(tuple(ids), tuple(ids if prompt_ids is None else prompt_ids), is_prefill=prefill)
    wrapper.update_metadata(mapping, list(slot_ids), SLOTS + 1, VOCAB)


def apply(wrapper, layer, x, base):
    y = base.clone()
    wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)
    return y


def error(y, base, delta, rows):
    return (y.float() - (base.float() + delta))[rows].abs()


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


MISSING = {
    "all slices": {},
    "q and v only": {0: (1,), 2: (1,)},
    "one slice each": {0: (1, 2), 1: (0, 2), 2: (0, 1), 3: (0, 1, 2)},
    "one adapter alone in the layer": {0: (0, 1, 2), 1: (0, 1, 2), 3: (0, 1, 2)},
}


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_equals_float32_at_least_as_closely_as_stock(ids, missing, prefill):
    """For every batch and slice mix the result is within bf16 rounding of float32, and no farther than stock's."""
    layer = loaded_layer(QKV, missing)
    x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
    delta = layer.delta(x, [lora_id - 1 for lora_id in ids])
    rows = [row for row, lora_id in enumerate(ids) if lora_id]

    ours = error(apply(wrapper_for(GroupedPunicaWrapper, ids, prefill=prefill), layer, x, base), base, delta, rows)
    stock = error(apply(wrapper_for(PunicaWrapperCPU, ids, prefill=prefill), layer, x, base), base, delta, rows)
    if rows:
        assert ours.max() <= max(stock.max(), 0.058)
        assert ours.pow(2).mean() <= stock.pow(2).mean() * 1.05 + 1e-9
        assert ours.pow(2).mean().sqrt() <= 0.005 * (base.float() + delta)[rows].pow(2).mean().sqrt()


@pytest.mark.parametrize("shape", [QKV, GATE_UP, DOWN], ids=["qkv", "gate_up", "down"])
@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_rows_without_an_adapter_are_the_base_bit_for_bit(ids, shape):
    """Base rows keep every bit, the sign of a zero too, whatever adapters sit beside them."""
    layer = loaded_layer(shape)
    x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
    base[:, ::7] = -0.0
    y = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    rows = [row for row, lora_id in enumerate(ids) if not lora_id]
    assert torch.equal(bits(y[rows]), bits(base[rows]))


@pytest.mark.parametrize("shape", [QKV, GATE_UP, DOWN], ids=["qkv", "gate_up", "down"])
def test_a_row_does_not_depend_on_its_neighbours_adapters(shape):
    """A row beside rows of other adapters gets what it gets alone, within bf16 rounding."""
    layer = loaded_layer(shape)
    ids = (1, 2, 3, 4, 0, 3)
    x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
    together = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    for row, lora_id in enumerate(ids):
        alone = apply(wrapper_for(GroupedPunicaWrapper, (lora_id,)), layer, x[row : row + 1], base[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("matrix", ["lora_a_stacked", "lora_b_stacked"])
def test_a_broken_adapter_reaches_no_other_row(matrix, poison):
    """An adapter with weights that are no numbers spoils its own rows and nobody else's."""
    layer = loaded_layer(QKV)
    ids = (1, 2, 3, 4, 0) * 4
    x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
    getattr(layer, matrix)[0][1, 0, :4, :4] = poison
    y = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    healthy = [row for row, lora_id in enumerate(ids) if lora_id != 2]
    delta = layer.delta(x, [lora_id - 1 for lora_id in ids])
    assert error(y, base, delta, healthy).max() <= 0.058
    assert not torch.equal(y[1], base[1])


def test_a_replaced_adapter_takes_effect_at_once():
    """Weights written into a slot in use count from the next product on, for one adapter and for several."""
    layer = loaded_layer(QKV)
    for ids in [(2,), (1, 2, 3, 4)]:
        wrapper = wrapper_for(GroupedPunicaWrapper, ids)
        x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
        base = torch.zeros(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
        before = apply(wrapper, layer, x, base)
        layer.load(1, 24)
        after = apply(wrapper, layer, x, base)
        row = ids.index(2)
        assert not torch.allclose(before[row], after[row], atol=0.1)
        assert (
            error(after, base, layer.delta(x, [lora_id - 1 for lora_id in ids]), list(range(len(ids)))).max() <= 0.058
        )


def test_a_reset_slot_has_no_effect():
    """After vLLM resets a slot (an adapter without this module), its rows are the base's."""
    layer = loaded_layer(QKV)
    ids = (1, 2, 3)
    wrapper = wrapper_for(GroupedPunicaWrapper, ids)
    x = torch.randn(3, layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(3, sum(layer.output_slices), dtype=torch.bfloat16)
    apply(wrapper, layer, x, base)
    layer.reset_lora(1)
    y = apply(wrapper, layer, x, base)
    assert torch.equal(y[1], base[1])
    assert not torch.equal(y[0], base[0])


def test_an_evicted_adapters_weights_reach_nobody():
    """vLLM leaves an evicted adapter's weights in its slot; they add nothing to rows of other adapters."""
    layer = loaded_layer(QKV)
    ids = (1, 3, 3, 1)
    x = torch.randn(4, layer.size_in, dtype=torch.bfloat16)
    base = torch.zeros(4, sum(layer.output_slices), dtype=torch.bfloat16)
    y = apply(wrapper_for(GroupedPunicaWrapper, ids, slot_ids=(1, None, 3, None, None)), layer, x, base)
    assert error(y, base, layer.delta(x, [0, 2, 2, 0]), [0, 1, 2, 3]).max() <= 0.058


def test_an_adapter_in_another_slot_is_found():
    """A row follows its adapter's slot, not its id."""
    layer = loaded_layer(DOWN)
    ids = (7, 5)
    x = torch.randn(2, layer.size_in, dtype=torch.bfloat16)
    base = torch.zeros(2, 576, dtype=torch.bfloat16)
    y = apply(wrapper_for(GroupedPunicaWrapper, ids, slot_ids=(None, 5, None, 7, None)), layer, x, base)
    assert error(y, base, layer.delta(x, [3, 1]), [0, 1]).max() <= 0.058


def test_an_empty_batch_is_no_error():
    """A step without rows changes nothing."""
    layer = loaded_layer(QKV)
    wrapper = wrapper_for(GroupedPunicaWrapper, ())
    y = apply(wrapper, layer, torch.empty(0, 576, dtype=torch.bfloat16), torch.empty(0, 960, dtype=torch.bfloat16))
    assert y.shape == (0, 960)


def test_nothing_mapped_yet_is_the_base():
    """Before the first mapping (warm-up) every row is a base row."""
    layer = loaded_layer(QKV)
    wrapper = GroupedPunicaWrapper(512, 128, torch.device("cpu"))
    base = torch.randn(4, 960, dtype=torch.bfloat16)
    assert torch.equal(apply(wrapper, layer, torch.randn(4, 576, dtype=torch.bfloat16), base), base)


def test_padding_rows_have_no_adapter_and_missing_rows_are_an_error():
    """Rows beyond the mapping stay as they are; fewer rows than mapped is refused rather than guessed."""
    layer = loaded_layer(QKV)
    wrapper = wrapper_for(GroupedPunicaWrapper, (1, 2))
    base = torch.randn(4, 960, dtype=torch.bfloat16)
    y = apply(wrapper, layer, torch.randn(4, 576, dtype=torch.bfloat16), base)
    assert torch.equal(y[2:], base[2:])
    assert not torch.equal(y[:2], base[:2])
    with pytest.raises(ValueError, match="got 1 rows, but 2"):
        apply(wrapper, layer, torch.randn(1, 576, dtype=torch.bfloat16), base[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype):
    """float32 and float16 models are served too."""
    layer = loaded_layer(QKV, dtype=dtype)
    ids = (1, 2, 0, 4, 3)
    x, base = torch.randn(5, 576, dtype=dtype), torch.randn(5, 960, dtype=dtype)
    y = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    assert error(y, base, layer.delta(x, [0, 1, -1, 3, 2]), list(range(5))).max() <= 0.01
    assert torch.equal(y[2], base[2])


@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN only", "torch only"])
@pytest.mark.parametrize("ids", [BATCHES["decodes with base rows"], BATCHES["decodes, then chunks"]], ids=len)
def test_every_kernel_gives_the_same(monkeypatch, onednn, ids):
    """CPUs without AVX512-BF16, and vLLM builds without oneDNN, are served as exactly."""
    monkeypatch.setattr(cpu_lora_ops, "can_be_strided", lambda weight: False)
    monkeypatch.setattr(cpu_gemm.vllm_ops, "_supports_onednn", onednn)
    layer = loaded_layer(QKV)
    x = torch.randn(len(ids), layer.size_in, dtype=torch.bfloat16)
    base = torch.randn(len(ids), sum(layer.output_slices), dtype=torch.bfloat16)
    y = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    assert error(y, base, layer.delta(x, [lora_id - 1 for lora_id in ids]), list(range(len(ids)))).max() <= 0.058
    rows = [row for row, lora_id in enumerate(ids) if not lora_id]
    assert torch.equal(bits(y[rows]), bits(base[rows]))


def test_a_reassigned_base_layer_is_the_one_used():
    """The shortcut to the base layer follows when vLLM puts another base layer in."""
    layer = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.base_layer = torch.nn.Linear(2, 2)
    cpu_lora._set_mapping(layer, None)
    layer.base_layer = other = torch.nn.Linear(2, 2)
    assert layer.base_layer is other
    assert layer.get_submodule("base_layer") is other


def test_adapters_in_another_dtype_than_the_model():
    """``lora_dtype=float32`` on a bf16 model is multiplied in float32, as stock does."""
    layer = loaded_layer(QKV, dtype=torch.float32)
    ids = (1, 2, 0, 4, 3)
    x, base = torch.randn(5, 576, dtype=torch.bfloat16), torch.randn(5, 960, dtype=torch.bfloat16)
    y = apply(wrapper_for(GroupedPunicaWrapper, ids), layer, x, base)
    assert error(y, base, layer.delta(x, [0, 1, -1, 3, 2]), list(range(5))).max() <= 0.058


def test_logits_follow_the_samples_mapping():
    """The head's rows are the sampled ones, its adapters those of the prompts, and padding columns stay."""
    layer = loaded_layer((576, (VOCAB,)))
    wrapper = wrapper_for(GroupedPunicaWrapper, (3,) * 50, prompt_ids=(3, 0, 1))
    x, base = torch.randn(3, 576, dtype=torch.bfloat16), torch.randn(3, VOCAB + 24, dtype=torch.bfloat16)
    y = base.clone()
    wrapper.add_lora_logits(y, x, layer.lora_a_stacked[0], layer.lora_b_stacked[0], 1.0)
    assert error(y[:, :VOCAB], base[:, :VOCAB], layer.delta(x, [2, -1, 0]), [0, 1, 2]).max() <= 0.058
    assert torch.equal(bits(y[1]), bits(base[1]))
    assert torch.equal(y[:, VOCAB:], base[:, VOCAB:])


def test_logits_cost_nothing_without_a_head_adapter():
    """Without an adapter on the head no product is made and no bit changes."""
    layer = Layer((576, (VOCAB,)))
    wrapper = wrapper_for(GroupedPunicaWrapper, (1, 2))
    base = torch.full((2, VOCAB), -0.0, dtype=torch.bfloat16)
    y = base.clone()
    wrapper.add_lora_logits(y, torch.randn(2, 576).bfloat16(), layer.lora_a_stacked[0], layer.lora_b_stacked[0], 1.0)
    assert torch.equal(bits(y), bits(base))


def test_embedding_rows():
    """The embedding's rows get their own B, base rows nothing, though vLLM looks up slot 0's A for them."""
    layer = Layer(DOWN)
    wrapper = wrapper_for(GroupedPunicaWrapper, (2, 0, 3))
    b = layer.lora_b_stacked[0]
    h, base = torch.randn(3, MAX_RANK).bfloat16(), torch.randn(3, 576).bfloat16()
    y = base.clone()
    wrapper.add_lora_embedding(y, h, b, add_input=True)
    assert torch.equal(bits(y), bits(base))
    for slot in range(len(RANKS)):
        layer.load(slot, MAX_RANK)
    wrapper.add_lora_embedding(y, h, b, add_input=True)
    for row, slot in ((0, 1), (2, 2)):
        expected = base[row].float() + b[slot, 0].float() @ h[row].float()
        torch.testing.assert_close(y[row].float(), expected, rtol=0.02, atol=0.03)
    assert torch.equal(bits(y[1]), bits(base[1]))


def test_fully_sharded_shrink_and_expand():
    """Shrink and expand apart, as fully sharded layers call them, give the same delta."""
    layer = loaded_layer(QKV)
    ids = (1, 0, 2, 4)
    wrapper = wrapper_for(GroupedPunicaWrapper, ids)
    x, base = torch.randn(4, 576).bfloat16(), torch.randn(4, 960).bfloat16()
    buffers = torch.zeros(3, 4, MAX_RANK)
    wrapper.add_shrink(buffers, x, layer.lora_a_stacked, 1.0)
    y = base.clone()
    wrapper.add_expand(y, buffers, layer.lora_b_stacked, layer.output_slices, offset_start=0, add_input=True)
    assert error(y, base, layer.delta(x, [0, -1, 1, 3]), list(range(4))).max() <= 0.058
    assert torch.equal(bits(y[1]), bits(base[1]))


def test_overwriting_and_scaling():
    """``add_inputs=False`` gives the bare delta, and a scale multiplies it."""
    layer = loaded_layer(QKV)
    wrapper = wrapper_for(GroupedPunicaWrapper, (1, 0, 3))
    x = torch.randn(3, 576).bfloat16()
    y = torch.randn(3, 960).bfloat16()
    wrapper.add_lora_linear(
        y, x, layer.lora_a_stacked, layer.lora_b_stacked, 0.5, layer.output_slices, add_inputs=False
    )
    assert (y.float() - 0.5 * layer.delta(x, [0, -1, 2])).abs().max() <= 0.058


@pytest.fixture
def unbound(monkeypatch):
    """vLLM as it comes; afterwards as it was before the test."""
    stock = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: stock))
    monkeypatch.setattr(BaseLinearLayerWithLoRA, "set_mapping", BaseLayerWithLoRA.set_mapping)


def test_register_binds_the_cpu_platform_and_may_run_again(unbound):
    """The entry point makes vLLM build our wrapper, says so, and is re-entrant."""
    assert not cpu_lora.is_active()
    vllm_plugin.register()
    vllm_plugin.register()
    assert cpu_lora.is_active()
    assert status.active()["cpu_lora"].startswith("active")
    assert not status.failures()
    wrapper = get_punica_wrapper(16, max_batches=4, device=torch.device("cpu"), lora_config=None)
    assert type(wrapper) is GroupedPunicaWrapper


def test_other_platforms_are_left_alone(unbound, monkeypatch):
    """Where vLLM does not run on the CPU nothing is rebound."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert "not used" in cpu_lora.install_cpu_lora()
    assert not cpu_lora.is_active()


def test_a_changed_interface_is_refused_and_stays_visible(unbound, monkeypatch):
    """When a method we replace takes other arguments, installing fails, naming it, and the status keeps the failure."""
    with monkeypatch.context() as patch:
        patch.setattr(PunicaWrapperCPU, "add_lora_linear", lambda self, y, x, adapters: None)
        with pytest.raises(compat.UpstreamChangedError, match="add_lora_linear"):
            vllm_plugin.register()
    assert "add_lora_linear" in status.failures()["cpu_lora"]
    assert not cpu_lora.is_active()
    vllm_plugin.register()
    assert not status.failures()


def test_upstream_has_the_interface_this_was_written_for():
    """Fails when vLLM changes the methods we replace: adapt `GroupedPunicaWrapper`, then `compat.PUNICA_METHODS`."""
    compat.check_punica_interface()


def test_stock_still_gives_base_rows_an_adapter():
    """Fails when vLLM fixes its own fault: then measure again whether the plug-in is still needed."""
    layer = loaded_layer(DOWN)
    layer.load(SLOTS - 1, 8)
    x, base = torch.randn(2, 1536).bfloat16(), torch.randn(2, 576).bfloat16()
    y = apply(wrapper_for(PunicaWrapperCPU, (1, 0), slot_ids=(1, None, None, None, 5)), layer, x, base)
    assert not torch.equal(y[1], base[1])

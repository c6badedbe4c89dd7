"""Linear layers: one weight of one or more checkpoint modules, stacked along the outputs.

A layer names its parts and which of their outputs and inputs this rank holds. Its method defines how the
weight is stored; the loader reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.lora import Lora
from windlass.kernels.reference_linear import Unpacked
from windlass.kernels.token_split import TokenSplit
from windlass.layers.stored import StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod
from windlass.quant.shard import Shard


@runtime_checkable
class FusingGroup(Protocol):
    """A group whose sums may be followed by a norm in the same kernel."""

    def all_reduce_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """Add the sum of all ranks' x to the residual stream and normalise: (normalised, residual)."""
        ...


MethodFor = Callable[[Iterable[str]], LinearMethod]  # from the names of a layer's parts


class Linear(StoredWeight):
    """y = x W.T + b.

    `outputs` maps checkpoint modules to the outputs that this rank holds. If they are cut, the layer
    is column-parallel and y has this rank's outputs. If `inputs` is cut, it is row-parallel: x has this
    rank's inputs, and y is all-reduced. A weight whose inputs cannot be cut is cut along its outputs
    instead: x and y are gathered from all ranks. The weight exists after the loader has filled `stored` and the
    method has finished the layer.

    Steps with adapters add LoRA deltas to the GEMM's outputs; their inputs must not be quantised.
    """

    def __init__(
        self,
        outputs: Mapping[str, Shard],
        inputs: Shard,
        method: LinearMethod,
        group: Group,
        bias: torch.dtype | None = None,
    ) -> None:
        gathered = None
        if not inputs.is_whole and not method.cuts_inputs:
            ((name, whole),) = outputs.items()
            outputs = {name: Shard.even(whole.whole, group)}
            gathered = inputs.counts, outputs[name].counts
            inputs = Shard(inputs.whole)
        super().__init__(outputs, inputs, method)
        self._gathered = gathered  # the numbers of all ranks' inputs and outputs
        self.group = group
        self.is_partial = not inputs.is_whole  # whether GEMMs give summands of y
        self.lora: Lora | None = None  # adapter slots, if LoRA is enabled
        if bias is not None:
            num_out = sum(self.parts.values())
            self.bias = nn.Parameter(torch.empty(num_out, dtype=bias), requires_grad=False)

    @property
    def _fused_group(self) -> FusingGroup | None:
        """The group that sums y and normalises the residual stream in one kernel, if it can."""
        if not self.is_partial or self.bias is not None:
            return None
        return self.group if isinstance(self.group, FusingGroup) else None

    @property
    def plain_weights(self) -> list[Tensor]:
        """Weights that GEMMs read unquantised: the parameter, or dequantised weights."""
        prepared = [gemm.prepared for gemm in self.gemms]
        unpacked = [each.weight for each in prepared if isinstance(each, Unpacked)]
        return unpacked if self.weight is None else [self.weight, *unpacked]

    def input_quant(self, num_rows: int) -> InputQuant | None:
        """How inputs of `num_rows` rows should be quantised; None: not at all."""
        if len(self.gemms) != 1 or self._gathered is not None:
            return None
        return self.gemms[0].prepared.input_quant(num_rows)

    def takes_unnormalised(self, num_rows: int) -> bool:
        """Whether inputs of `num_rows` rows may be `UnnormalisedInputs`."""
        return self._gathered is None and self.method.takes_unnormalised(self, num_rows)

    def raw(self, x: Inputs, adapters: AdapterRows | None = None) -> Outputs:
        """y, possibly with separate scales that the caller must apply."""
        separate = adapters is not None or self.bias is not None or self._is_cut
        if separate or len(self.gemms) != 1:
            return self(x, adapters)
        return self.gemms[0].prepared.raw(x)

    @property
    def _is_cut(self) -> bool:
        """Whether the GEMMs give some of y, or summands of it."""
        return self.is_partial or self._gathered is not None

    def forward(self, x: Inputs, adapters: AdapterRows | None = None) -> Tensor:
        return self.output(x, adapters)

    def output(
        self, x: Inputs, adapters: AdapterRows | None = None, split: TokenSplit | None = None
    ) -> Tensor:
        """y; with `split`, which row-parallel layers may have, of this rank's tokens alone."""
        if self._gathered is None:
            return self._own(x, adapters, split)
        assert isinstance(x, Tensor)  # `input_quant` is None
        inputs, outputs = self._gathered
        y = self._own(self.group.all_gather(x, inputs), adapters, None)
        y = self.group.all_gather(y, outputs)
        return y if split is None else split.own(y)

    def _own(self, x: Inputs, adapters: AdapterRows | None, split: TokenSplit | None) -> Tensor:
        """y, as far as this rank has outputs."""
        if adapters is not None and self.lora is not None:
            return self._adapted(x, self.lora, adapters, split)
        y = self.method.apply(self, x)
        if self.is_partial:
            y = self._sum(y, split)
        return self._biased(y)

    def _sum(self, y: Tensor, split: TokenSplit | None) -> Tensor:
        """The sum of all ranks' y."""
        return self.group.all_reduce(y) if split is None else split.reduce_scatter(y)

    def _biased(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias

    def _adapted(
        self, x: Inputs, lora: Lora, adapters: AdapterRows, split: TokenSplit | None
    ) -> Tensor:
        assert isinstance(x, Tensor)  # steps with adapters never quantise inputs
        low = lora.begin(x, adapters)
        y = self.method.apply(self, x)
        if self.is_partial:
            return self._biased(self._sum(lora.end(y, low, adapters), split))
        # The bias comes first: the GEMMs of recorded programs add it.
        return lora.end(self._biased(y), low, adapters)

    def then(
        self,
        x: Inputs,
        residual: Tensor,
        norm: Norm,
        adapters: AdapterRows | None = None,
        split: TokenSplit | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Add y to the residual stream and normalise: (normalised, new residual).

        With `split`, x has all tokens, and the residual stream this rank's tokens.
        """
        if split is not None:
            unquantised = adapters is not None or split.is_unquantised(norm)
            return norm.add(self.output(x, adapters, split), residual, unquantised)
        separate = self.bias is not None or self._is_cut or not norm.fusable
        if adapters is not None and self.lora is not None and not separate:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.then(self.method.apply(self, x), low, adapters, residual, norm)
        if adapters is None and self._fused_group is not None and norm.fusable:
            y = self.method.apply(self, x)
            return self._fused_group.all_reduce_norm(y, residual, norm)
        if adapters is not None or separate:
            return norm.add(self(x, adapters), residual, unquantised=adapters is not None)
        return self.method.then(self, x, residual, norm)

    def gated(
        self,
        x: Inputs,
        silu_mul: Callable[[Outputs], Inputs],
        adapters: AdapterRows | None = None,
    ) -> Inputs:
        """silu(first half of y) * second half of y, for a layer of two parts."""
        if adapters is not None and self.lora is not None and self.bias is None:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.gated(self.method.apply(self, x), low, adapters, silu_mul)
        if adapters is not None or self.bias is not None:
            return silu_mul(self(x, adapters))
        return self.method.gated(self, x, silu_mul)

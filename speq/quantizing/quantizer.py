"""Layer-by-layer quantization of a model under a memory budget.

Everything but the experts is in memory, and one expert at a time. The input of a layer is known for
all tokens. A first pass runs the layer without its experts and records their inputs. Then each
expert is read and quantised with its tokens, and its exact output is added. Dense layers are
quantised with their inputs in the first pass, before the held-out text is run.
"""

import logging
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from speq.devices.device import Processor
from speq.errors import OptionError
from speq.experts.expert_store import (
    expert_slot,
    read_matrices,
)
from speq.files.alone import lock_folder
from speq.files.atomic_file import make_folder, writing
from speq.layers.offloaded_experts import ExpertBackend
from speq.models import moe_model
from speq.models.dense_parts import DenseShape
from speq.models.layerwise import LayerwiseModel
from speq.models.opened import Opened
from speq.models.shape import ModelShape
from speq.quantizing import activations, expert
from speq.quantizing.activations import ActivationRows, FileRows, MemoryRows
from speq.quantizing.calibration import Calibration
from speq.quantizing.checkpoint_folder import (
    LayerShards,
    QuantizeFolder,
    pack_matrix,
    tensors_of,
    write_tensor,
)
from speq.quantizing.dense import DenseLayers
from speq.quantizing.expert import ExpertConstants, FloatExpert, Hessians, QuantisedExpert
from speq.quantizing.fits import check_dtype, check_sizes, codes_for, fits
from speq.quantizing.lanes import CALIBRATION, DRAFT, HELD_OUT, ROUNDED, Lanes, RecordingBackend
from speq.quantizing.plan import SCORED_ROWS, plan_of
from speq.quantizing.report import ExpertReport, LayerReport, QuantizeReport, TextReport
from speq.quantizing.residual import ResidualCount, residual_of
from speq.quantizing.settings import QuantizeSettings
from speq.quantizing.text_score import TextScore
from speq.units import Progress, track

logger = logging.getLogger("speq")


def quantize(
    source: Opened,
    calibration: Calibration,
    settings: QuantizeSettings,
    out: Path,
    memory_budget: int,
    version: str,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write a GPTQ checkpoint to `out`, or continue an earlier run there.

    progress  called with (what, done, total): experts of all, and within a layer the windows of the
              text

    Raises SpeqError if the budget, the disk, the folder or the model does not allow it.
    """
    layout = source.shape.experts
    if settings.codes == "auto":
        settings = replace(settings, codes=codes_for(source.store.codec.shape.dtype))
    check_sizes(settings, layout.hidden_size, layout.expert_width)
    check_dtype(settings, source.store.codec.shape.dtype)
    if settings.sequence_length > source.shape.max_context:
        raise OptionError(
            f"sequence_length is {settings.sequence_length}; the model's limit is "
            f"{source.shape.max_context}: give a shorter --sequence-length"
        )
    if settings.method == "rtn":  # needs no calibration
        calibration = Calibration(calibration.calibration[:0], calibration.held_out)
    lanes = Lanes.of(calibration, rounds_too=settings.method != "rtn")
    dtype = source.store.codec.shape.dtype
    loading = source.converted_bytes(dtype)
    dense = dense_of(source.shape, settings)
    plan = plan_of(source.shape, source.store, dtype, lanes, dense, loading, memory_budget)
    make_folder(out)
    another = f"another process writes to {out}; wait for its end, or give another folder"
    remedy = "finished layers are kept: run the same command to continue"
    with lock_folder(out, another), writing(out, remedy):
        folder = QuantizeFolder(
            out,
            source.checkpoint,
            calibration.digest(),
            LayerShards(layout, settings, dense, source.checkpoint.on_disk),
            progress,
        )
        # A layer's input and output rows are kept until its journal line is written.
        kept = lanes.rows * layout.hidden_size * 4
        working = 0 if plan.in_memory else kept + kept // 4 * dtype.itemsize
        folder.check_room(source.checkpoint, 2 * kept + working)
        with ExitStack() as stack:
            widths = {"hidden": torch.float32, "asked": dtype}
            rows = {}
            for name, kind in widths.items():
                rows[name] = (
                    MemoryRows(lanes.rows, layout.hidden_size, kind)
                    if plan.in_memory
                    else FileRows(folder.work(name), lanes.rows, layout.hidden_size, kind)
                )
                stack.enter_context(closing(rows[name]))
            model = moe_model.load(source.family, source.checkpoint, dtype, Processor())
            work = Quantizer(source, settings, lanes, model, rows["hidden"], rows["asked"], folder)
            return work.run(calibration, version, progress)


def dense_of(shape: ModelShape, settings: QuantizeSettings) -> tuple[DenseShape, ...]:
    """Choose the dense layers to quantise: those in decoder layers that the format can hold."""
    if not settings.dense:
        return ()
    inside = [each for each in shape.draft_layers if each.layer is not None]
    left = [each.name for each in inside if not fits(settings, each)]
    if left:
        logger.warning(
            "%d dense layers are not quantised, such as %s: their dimensions are not whole groups "
            "of %d, or not multiples of 8",
            len(left),
            left[0],
            settings.group_size,
        )
    return tuple(each for each in inside if fits(settings, each))


class Quantizer:
    """One run of quantising.

    hidden  [R, H] float32, input of the current layer
    asked   inputs of its experts, in the model's dtype
    """

    def __init__(
        self,
        source: Opened,
        settings: QuantizeSettings,
        lanes: Lanes,
        model: moe_model.MoEModel,
        hidden: ActivationRows,
        asked: ActivationRows,
        folder: QuantizeFolder,
    ) -> None:
        self._source, self._settings, self._lanes = source, settings, lanes
        self._layers = LayerwiseModel(model, lanes.length)
        self._linears, self._biases = model.dense, model.biases
        self._hidden = hidden
        scale = source.family.output_scale(model.body.config)
        self._backend = RecordingBackend(asked, lanes.rows, source.shape.top_k, scale)
        self._folder = folder
        self._slot = expert_slot(source.store)

    @torch.inference_mode()
    def run(
        self, calibration: Calibration, version: str, progress: Progress | None
    ) -> QuantizeReport:
        folder = self._folder
        if folder.text is None:
            self._run_layers(calibration, progress)
            folder.finish_text(self._text(calibration))
        report = QuantizeReport(
            self._settings.as_json(),
            calibration.calibration.numel(),
            calibration.held_out.numel(),
            tuple(folder.done),
            folder.text or {},
        )
        folder.finish(self._source.checkpoint, report.to_json(), version)
        return report

    def _run_layers(self, calibration: Calibration, progress: Progress | None) -> None:
        """Run the layers that are not done."""
        layout, folder = self._source.shape.experts, self._folder
        total = len(layout.layers) * layout.num_experts
        self._enter(calibration)
        for layer in range(len(folder.done), self._layers.num_layers):
            names = (shape.name for shape in folder.shards.dense_of(layer))
            dense = DenseLayers({name: self._linears[name] for name in names}, self._settings)
            self._run_layer(layer, dense, progress)
            report = LayerReport(layer)
            if layer in folder.shards.layers:
                report = self._quantise_layer(layer, dense, progress, total)
            dense.leave()
            leaving = folder.activations(layer + 1)
            crc32 = activations.save(self._hidden, self._lanes.rows, leaving)
            folder.finish_layer(report, crc32)

    def _enter(self, calibration: Calibration) -> None:
        """Compute or load the input of the first layer that is not done."""
        done = len(self._folder.done)
        if done:
            width = self._source.shape.hidden_size
            entering = self._folder.activations(done)
            activations.load(self._hidden, self._lanes.rows, width, entering)
            return
        windows = self._lanes.token_ids(calibration)
        for start, token_ids in zip(self._lanes.starts(), windows, strict=True):
            self._hidden.write(start, self._layers.entering(token_ids).float())

    def _run_layer(self, layer: int, dense: DenseLayers, progress: Progress | None) -> None:
        """Run a layer without its experts, in place; each lane with its own dense layers."""
        backend: ExpertBackend = self._backend
        starts = list(self._lanes.starts())
        what = f"running layer {layer + 1} of {self._layers.num_layers}"
        for start in track(what, starts, len(starts), progress):
            self._backend.begin(start)
            entering = self._hidden.read(start, self._lanes.length)
            with dense.in_lane(self._lanes.lane_of(start), self._backend):
                leaving = self._layers.run(layer, backend, entering)
            self._hidden.write(start, leaving.float())

    def _quantise_layer(
        self, layer: int, dense: DenseLayers, progress: Progress | None, total: int
    ) -> LayerReport:
        """Write a layer's quantised dense layers and experts to its shard, and add the experts'
        outputs.
        """
        layout = self._source.shape.experts
        reports = []
        with self._folder.shard(layer) as file:
            for matrix in dense.quantise().values():
                for tensor in pack_matrix(matrix, slice(None)):
                    write_tensor(tensor, file)
            if layer not in layout.layers:
                return LayerReport(layer)
            moe_layer = layout.layers.index(layer)
            for index in range(layout.num_experts):
                exact = self._read(moe_layer, index)
                quantised, report = self._quantise(exact, index, f"expert {index} of layer {layer}")
                reports.append(report)
                for tensor in tensors_of(quantised):
                    write_tensor(tensor, file)
                if progress is not None:
                    done = moe_layer * layout.num_experts + index + 1
                    progress("quantising experts", done, total)
        return LayerReport(layer, tuple(reports), *self._routes())

    def _read(self, moe_layer: int, index: int) -> FloatExpert:
        exact = read_matrices(self._source.store, moe_layer, index, self._slot)
        # Copies: the slot is read into again.
        gate_up_proj, down_proj = (matrix.to(torch.float32, copy=True) for matrix in exact)
        between = ExpertConstants(self._source.shape.activations[moe_layer])
        if self._biases:
            of_layer = self._biases[moe_layer]
            biases = (each[index].float() for each in (of_layer.gate_up, of_layer.down))
            between = ExpertConstants(between.activation, *biases)
        return FloatExpert(gate_up_proj, down_proj, between)

    def _quantise(
        self, exact: FloatExpert, index: int, where: str
    ) -> tuple[QuantisedExpert, ExpertReport]:
        """Quantise one expert, and add its outputs in all lanes."""
        hessians = Hessians.empty(exact)
        self._add(CALIBRATION, index, exact, hessians)
        quantised = expert.quantise_expert(exact, hessians, self._settings, where)
        tokens = hessians.tokens
        del hessians
        rounded = quantised
        if quantised.method != "rtn":
            rounded = expert.round_expert(exact, self._settings)
        residuals = self._residuals(exact, quantised, rounded)
        draft = quantised.dequantise(exact.between)
        plain = draft if rounded is quantised else rounded.dequantise(exact.between)
        self._add(DRAFT, index, draft)
        self._add(ROUNDED, index, plain)
        held_out, error, rounding_error, output = self._add_held_out(index, exact, draft, plain)
        report = ExpertReport(
            tokens,
            held_out,
            quantised.method,
            quantised.damp,
            error,
            rounding_error,
            output,
            *residuals,
        )
        return quantised, report

    def _residuals(
        self, exact: FloatExpert, *drafts: QuantisedExpert
    ) -> tuple[ResidualCount | None, ...]:
        """Count the residual of the exact expert over each draft of it; None unless it is in
        bfloat16.
        """
        if self._source.store.codec.shape.dtype != torch.bfloat16:
            return (None,) * len(drafts)
        return tuple(residual_of(exact, draft) for draft in drafts)

    def _add(
        self, lane: str, index: int, experts: FloatExpert, hessians: Hessians | None = None
    ) -> None:
        rows, weights = self._backend.rows_of(index, self._lanes.span(lane))
        expert.run(experts, self._backend.inputs, rows, weights, self._hidden, hessians)

    def _add_held_out(
        self, index: int, exact: FloatExpert, draft: FloatExpert, plain: FloatExpert
    ) -> tuple[int, float, float, float]:
        """Add the exact expert's outputs for the held-out lane. Return (tokens, squared error of
        the draft, squared error of rounding, squared outputs).
        """
        rows, weights = self._backend.rows_of(index, self._lanes.span(HELD_OUT))
        sums = [0.0, 0.0, 0.0]
        size = expert.EXPERT_ROWS
        for block, shares in zip(rows.split(size), weights.split(size), strict=True):
            given = self._backend.inputs.gather(block).float()
            wanted = exact(given) * shares[:, None]
            self._hidden.add(block, wanted)
            for at, other in enumerate((draft, plain)):
                error = other(given).mul_(shares[:, None]).sub_(wanted)
                sums[at] += float(error.double().square().sum())
            sums[2] += float(wanted.double().square().sum())
        return len(rows), sums[0], sums[1], sums[2]

    def _routes(self) -> tuple[float | None, float | None]:
        """Compare the draft's lane with the exact one: (route recall, share of equal routes)."""
        used = self._backend.topk_ids[self._lanes.span(HELD_OUT)]
        named = self._backend.topk_ids[self._lanes.span(DRAFT)]
        if not len(used):
            return None, None
        hits = (used[:, :, None] == named[:, None, :]).any(2)
        return float(hits.double().mean()), float(hits.all(1).double().mean())

    def _text(self, calibration: Calibration) -> dict[str, TextReport]:
        """Evaluate each lane on the held-out text, from the output of the last layer."""
        lanes = self._lanes
        judged = [lane for lane in (HELD_OUT, DRAFT, ROUNDED) if lanes.windows[lane][1]]
        scores = {lane: TextScore() for lane in judged}
        for at, token_ids in enumerate(calibration.held_out):
            for begin in range(0, lanes.length - 1, SCORED_ROWS):
                rows = min(SCORED_ROWS, lanes.length - 1 - begin)
                targets = token_ids[begin + 1 : begin + 1 + rows]
                exact: Tensor | None = None
                for lane, score in scores.items():
                    start = (lanes.windows[lane][0] + at) * lanes.length + begin
                    logits = self._layers.logits(self._hidden.read(start, rows))
                    found = logits.log_softmax(-1)
                    exact = found if exact is None else exact
                    score.add(found, exact, targets)
        return {lane: score.report() for lane, score in scores.items()}

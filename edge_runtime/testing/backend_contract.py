"""The promises of every backend (backends/base.py), as tests of pytest: a class to inherit from, with a `kit`.

    from edge_runtime.testing import BackendContract, BackendKit

    class TestDense(BackendContract):
        @pytest.fixture
        def kit(self) -> BackendKit:
            return BackendKit("dense", DenseBackend(), make_model, corrupt=(b"", b"not a model"), has_bound=False)

Our own backends run through the same tests.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed, UnreadableText
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import resident_bytes
from edge_runtime.tensors import DATATYPES, Array
from edge_runtime.testing.backend_kit import BackendKit, mlp_answer, mlp_input

HELD_BYTES = 4 << 20
"""The weights of the model `wide`."""


@contextmanager
def loaded(artifact: Path, kit: BackendKit, options: LoadOptions | None = None) -> Iterator[Instance]:
    """Load an artifact, and close it at the end."""
    instance = kit.backend.load(artifact, options or LoadOptions())
    try:
        yield instance
    finally:
        instance.close()


class BackendContract:
    """The promises. A subclass gives the fixture `kit`, of one backend or parametrised over several."""

    @pytest.fixture
    def kit(self) -> BackendKit:
        """Return the kit of the backend to hold against the contract."""
        raise NotImplementedError("give the fixture `kit`, which returns a BackendKit")

    def test_probe_says_it_is_available_with_version_and_devices(self, kit: BackendKit) -> None:
        probe = kit.backend.probe()
        assert probe.name == kit.backend.declaration.name
        assert probe.is_available, probe.reason
        assert probe.version
        assert kit.device in probe.devices

    def test_specs_are_the_models_own_with_a_dynamic_batch_axis(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            assert instance.spec == ModelSpec(
                (TensorSpec("x", "FP32", (-1, 16)),), (TensorSpec("y", "FP32", (-1, 4)),)
            )  # fmt: skip
            assert instance.spec.may_batch

    @pytest.mark.parametrize("rows", [1, 2, 7, 33])
    def test_a_dynamic_batch_axis_takes_any_number_of_rows(self, kit: BackendKit, tmp_path: Path, rows: int) -> None:
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            x = mlp_input(rows)
            (y,) = instance.run({"x": x})
            np.testing.assert_allclose(y, mlp_answer(x), rtol=1e-4, atol=1e-4)

    def test_a_fixed_batch_axis_is_in_the_spec_and_takes_only_that(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("mlp", tmp_path, rows=3), kit) as instance:
            assert instance.spec.inputs[0].shape == (3, 16)
            assert not instance.spec.may_batch
            (y,) = instance.run({"x": mlp_input(3)})
            np.testing.assert_allclose(y, mlp_answer(mlp_input(3)), rtol=1e-4, atol=1e-4)

    def test_a_dynamic_axis_of_steps_gives_as_many_steps(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("running_sum", tmp_path), kit) as instance:
            x = np.arange(20, dtype=np.float32).reshape(5, 4)
            (y,) = instance.run({"x": x})
            np.testing.assert_allclose(y, x.cumsum(axis=0))

    @pytest.mark.parametrize("found", [0, 1, 4])
    def test_an_output_may_have_as_many_rows_as_the_data_asks_for(
        self, kit: BackendKit, tmp_path: Path, found: int
    ) -> None:
        x = np.zeros((2, 2), np.float32)
        x.flat[:found] = 1
        with loaded(kit.artifact("where_nonzero", tmp_path), kit) as instance:
            (places,) = instance.run({"x": x})
            assert places.dtype == np.int64
            np.testing.assert_array_equal(places, np.argwhere(x))

    def test_several_inputs_and_outputs_keep_the_models_order(self, kit: BackendKit, tmp_path: Path) -> None:
        a, b = np.ones((2, 3), np.float32), np.array([[1, 2], [3, 4]])
        with loaded(kit.artifact("two_in_two_out", tmp_path), kit) as instance:
            assert [spec.name for spec in instance.spec.inputs] == ["a", "b"]
            assert [spec.name for spec in instance.spec.outputs] == ["sum", "twice"]
            doubled, twice = instance.run({"b": b, "a": a})
            np.testing.assert_array_equal(doubled, a + a)
            np.testing.assert_array_equal(twice, b + b)

    def test_outputs_come_in_the_order_asked_for(self, kit: BackendKit, tmp_path: Path) -> None:
        inputs = {"a": np.ones((1, 3), np.float32), "b": np.array([[1, 2]])}
        with loaded(kit.artifact("two_in_two_out", tmp_path), kit) as instance:
            (twice,) = instance.run(inputs, ["twice"])
            np.testing.assert_array_equal(twice, [[2, 4]])
            twice, doubled = instance.run(inputs, ["twice", "sum"])
            assert (twice.dtype, doubled.dtype) == (np.int64, np.float32)

    @pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
    def test_every_numeric_datatype_goes_through_unchanged(
        self, kit: BackendKit, tmp_path: Path, datatype: str
    ) -> None:
        if datatype in kit.lacks:
            with pytest.raises(LoadFailed, match=datatype[:2]):
                kit.backend.load(kit.artifact("identity", tmp_path, datatype=datatype), LoadOptions())
            return
        x: Array = np.array([[0, 1], [1, 0]]).astype(DATATYPES[datatype].dtype)
        if datatype == "BF16":
            x = np.array([[0x0000, 0x3F80], [0xC000, 0x7F80]], np.uint16)  # 0, 1, -2, infinity
        with loaded(kit.artifact("identity", tmp_path, datatype=datatype), kit) as instance:
            assert {spec.datatype for spec in (*instance.spec.inputs, *instance.spec.outputs)} == {datatype}
            (y,) = instance.run({"x": x})
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)

    def test_bytes_go_through_unchanged_or_fail_to_load(self, kit: BackendKit, tmp_path: Path) -> None:
        if not kit.has_bytes:
            with pytest.raises(LoadFailed, match="string, which cannot be sent"):
                kit.backend.load(kit.artifact("identity", tmp_path, datatype="BYTES"), LoadOptions())
            return
        x: Array = np.array([[b"", "grün".encode()], [b"a longer one", b"b"]], dtype=object)
        with loaded(kit.artifact("identity", tmp_path, datatype="BYTES"), kit) as instance:
            assert instance.spec.inputs[0].datatype == "BYTES"
            (y,) = instance.run({"x": x})
            assert y.tolist() == x.tolist()

    def test_bytes_that_are_not_text_go_through_or_fail_clearly(self, kit: BackendKit, tmp_path: Path) -> None:
        if not kit.has_bytes:
            pytest.skip("takes no bytes at all, which the test above holds")
        x: Array = np.array([[b"\xff\xfe", b"\x80"]], dtype=object)
        with loaded(kit.artifact("identity", tmp_path, datatype="BYTES"), kit) as instance:
            if kit.bytes_must_be_text:
                with pytest.raises(UnreadableText, match="UTF-8"):
                    instance.run({"x": x})
            else:
                (y,) = instance.run({"x": x})
                assert y.tolist() == x.tolist()

    def test_no_rows_give_no_rows_or_a_failed_run(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            try:
                (y,) = instance.run({"x": mlp_input(0)})
            except RunFailed:
                pass
            else:
                assert y.shape == (0, 4)
            assert instance.run({"x": mlp_input(1)})[0].shape == (1, 4)

    def test_read_only_and_strided_inputs_give_the_same_answer(self, kit: BackendKit, tmp_path: Path) -> None:
        x = mlp_input(4)
        read_only = np.frombuffer(x.tobytes(), np.float32).reshape(4, 16)
        strided = np.asfortranarray(x)
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            (wanted,) = instance.run({"x": x})
            for other in (read_only, strided):
                np.testing.assert_array_equal(instance.run({"x": other})[0], wanted)

    def test_a_result_stays_as_it_was_after_the_next_run(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            (first,) = instance.run({"x": mlp_input(4)})
            before = first.copy()
            instance.run({"x": mlp_input(4) + 1})
            np.testing.assert_array_equal(first, before)

    def test_a_failed_run_leaves_the_instance_usable(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            for wrong in (np.zeros((1, 15), np.float32), np.zeros((1, 16, 2), np.float32)):
                with pytest.raises(RunFailed):
                    instance.run({"x": wrong})
            np.testing.assert_allclose(
                instance.run({"x": mlp_input(2)})[0], mlp_answer(mlp_input(2)), rtol=1e-4, atol=1e-4
            )

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_run_that_fails_inside_the_model_never_gives_an_earlier_answer(
        self, kit: BackendKit, tmp_path: Path, threads: int
    ) -> None:
        """OpenVINO with one thread lost the exception and left the outputs of the run before."""
        a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
        with loaded(kit.artifact("product", tmp_path), kit, LoadOptions(threads=threads)) as instance:
            for _ in range(2):
                np.testing.assert_array_equal(instance.run({"a": a, "b": b})[0], a @ b)
                with pytest.raises(RunFailed):
                    instance.run({"a": a, "b": np.ones((5, 4), np.float32)})

    def test_runs_from_as_many_threads_as_promised_keep_their_answers(self, kit: BackendKit, tmp_path: Path) -> None:
        wrong: list[int] = []

        def many(instance: Instance, rows: int) -> None:
            x = mlp_input(rows)
            for _ in range(50):
                if not np.allclose(instance.run({"x": x})[0], mlp_answer(x), rtol=1e-4, atol=1e-4):
                    wrong.append(rows)

        with loaded(kit.artifact("mlp", tmp_path), kit, LoadOptions(concurrency=3)) as instance:
            assert instance.concurrency >= 1
            threads = [threading.Thread(target=many, args=(instance, rows)) for rows in (1, 2, 5)]
            for thread in threads[: instance.concurrency]:
                thread.start()
            for thread in threads[: instance.concurrency]:
                thread.join()
        assert not wrong

    @pytest.mark.parametrize("spare", [0, 3])
    def test_bound_runs_equal_plain_runs_for_each_number_of_rows(
        self, kit: BackendKit, tmp_path: Path, spare: int
    ) -> None:
        kit.need_bound()
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            bound = instance.bind(5 + spare)
            assert bound is not None
            assert bound.max_rows == 5 + spare
            assert [array.shape for array in (*bound.inputs, *bound.outputs)] == [(5 + spare, 16), (5 + spare, 4)]
            for rows in (1, 5, 2, 2, 4, 3, 1):
                x = mlp_input(rows)
                bound.inputs[0][:rows] = x
                bound.outputs[0][:] = np.nan
                bound.run(rows)
                np.testing.assert_array_equal(bound.outputs[0][:rows], instance.run({"x": x})[0])
                assert np.isnan(bound.outputs[0][rows:]).all(), "rows that were not asked for were written"

    def test_rows_outside_the_buffers_fail_and_leave_the_binding_usable(self, kit: BackendKit, tmp_path: Path) -> None:
        kit.need_bound()
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            bound = instance.bind(2)
            assert bound is not None
            for rows in (0, 3, 99, -1):
                with pytest.raises(RunFailed):
                    bound.run(rows)
            bound.inputs[0][:] = mlp_input(2)
            bound.run(2)
            np.testing.assert_allclose(bound.outputs[0], mlp_answer(mlp_input(2)), rtol=1e-4, atol=1e-4)

    def test_a_fixed_batch_is_bound_for_just_its_rows(self, kit: BackendKit, tmp_path: Path) -> None:
        kit.need_bound()
        with loaded(kit.artifact("mlp", tmp_path, rows=3), kit) as instance:
            assert instance.bind(2) is None
            bound = instance.bind(8)
            assert bound is not None
            assert bound.max_rows == 3
            bound.inputs[0][:] = mlp_input(3)
            bound.run(3)
            np.testing.assert_allclose(bound.outputs[0], mlp_answer(mlp_input(3)), rtol=1e-4, atol=1e-4)
            with pytest.raises(RunFailed):
                bound.run(1)

    def test_an_open_inner_output_shape_is_learnt_before_binding(self, kit: BackendKit, tmp_path: Path) -> None:
        kit.need_bound()
        artifact = kit.artifact("mlp", tmp_path, output_shape=["rows", "scores"])
        with loaded(artifact, kit) as instance:
            bound = instance.bind(2)
            assert bound is not None
            assert bound.outputs[0].shape == (2, 4)
            bound.inputs[0][:] = mlp_input(2)
            bound.run(2)
            np.testing.assert_allclose(bound.outputs[0], mlp_answer(mlp_input(2)), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("datatype", list(DATATYPES))
    def test_every_datatype_is_bound_or_declined(self, kit: BackendKit, tmp_path: Path, datatype: str) -> None:
        kit.need_bound()
        if datatype == "BYTES" and not kit.has_bytes:
            pytest.skip("takes no bytes at all")
        if datatype in kit.lacks:
            pytest.skip("cannot be loaded, which another test holds")
        with loaded(kit.artifact("identity", tmp_path, datatype=datatype), kit) as instance:
            bound = instance.bind(2)
            if datatype == "BYTES":
                assert bound is None
                return
            assert bound is not None
            x = np.array([[0, 1], [1, 0]]).astype(DATATYPES[datatype].dtype)
            bound.inputs[0][:] = x
            bound.run(2)
            np.testing.assert_array_equal(bound.outputs[0], x)

    @pytest.mark.parametrize("found", [1, 4])
    def test_a_binding_never_gives_other_rows_than_it_took(self, kit: BackendKit, tmp_path: Path, found: int) -> None:
        kit.need_bound()
        with loaded(kit.artifact("where_nonzero", tmp_path), kit) as instance:
            bound = instance.bind(2)
            if bound is None:
                return
            bound.inputs[0].flat[:found] = 1
            with pytest.raises(RunFailed):
                bound.run(2)
            bound.inputs[0][:] = np.array([[1, 0], [0, 1]])
            bound.run(2)
            np.testing.assert_array_equal(bound.outputs[0], [[0, 0], [1, 1]])

    def test_an_instance_that_binds_no_buffers_says_so(self, kit: BackendKit, tmp_path: Path) -> None:
        if kit.has_bound:
            pytest.skip("binds buffers")
        with loaded(kit.artifact("mlp", tmp_path), kit) as instance:
            assert instance.bind(4) is None

    def test_a_run_after_close_fails_and_close_is_idempotent(self, kit: BackendKit, tmp_path: Path) -> None:
        instance = kit.backend.load(kit.artifact("mlp", tmp_path), LoadOptions())
        bound = instance.bind(2)
        instance.close()
        instance.close()
        with pytest.raises(RunFailed, match="closed"):
            instance.run({"x": mlp_input(1)})
        if bound is not None:
            with pytest.raises(RunFailed, match="closed"):
                bound.run(1)

    def test_device_precision_and_memory_are_read_back(self, kit: BackendKit, tmp_path: Path) -> None:
        with loaded(kit.artifact("wide", tmp_path), kit) as instance:
            assert instance.backend == kit.backend.declaration.name
            assert instance.device == kit.device
            assert instance.precision == kit.precision
            assert instance.memory_bytes >= (HELD_BYTES if kit.measures_memory else 0)

    def test_a_device_that_is_not_there_is_unavailable_by_name(self, kit: BackendKit, tmp_path: Path) -> None:
        with pytest.raises(BackendUnavailable, match="ABACUS"):
            kit.backend.load(kit.artifact("mlp", tmp_path), LoadOptions(device="ABACUS"))

    def test_corrupt_artifacts_fail_to_load_with_a_reason(self, kit: BackendKit, tmp_path: Path) -> None:
        artifact = kit.artifact("mlp", tmp_path)
        for content in kit.corrupt:
            artifact.write_bytes(content)
            with pytest.raises(LoadFailed) as failure:
                kit.backend.load(artifact, LoadOptions())
            assert len(failure.value.message) > 20

    def test_a_missing_artifact_fails_to_load(self, kit: BackendKit, tmp_path: Path) -> None:
        with pytest.raises(LoadFailed, match="No such file"):
            kit.backend.load(tmp_path / kit.backend.declaration.artifacts[0], LoadOptions())

    def test_loading_and_closing_again_and_again_keeps_memory_flat(self, kit: BackendKit, tmp_path: Path) -> None:
        """Of 4 MiB of weights a cycle may keep about a tenth.

        By the least in a third of the cycles, for a thread of OpenVINO holds a closed model or two now and then, for
        some cycles or for good: three are let pass over the 27 cycles between, and a leak of each would be 27.
        """
        artifact = kit.artifact("wide", tmp_path)
        model_bytes = HELD_BYTES
        cycles = kit.cycles
        x = np.zeros((4, 1024), np.float32)
        after: list[int] = []
        gc.freeze()  # a thousand tests' leavings need no looking through at each cycle
        for _ in range(cycles):
            instance = kit.backend.load(artifact, LoadOptions())
            bound = instance.bind(4)
            instance.run({"x": x})
            if bound is not None:
                bound.run(4)
            instance.close()
            del instance, bound
            gc.collect()
            # What the allocator keeps for the next one is not a leak: it comes and goes in steps of a whole model.
            ctypes.CDLL(None).malloc_trim(0)
            after.append(resident_bytes())
        gc.unfreeze()
        settled = after[cycles // 3 :]
        third = len(settled) // 3
        growth = min(settled[-third:]) - min(settled[:third])
        assert growth < 3 * model_bytes, " ".join(str(size >> 10) for size in after)

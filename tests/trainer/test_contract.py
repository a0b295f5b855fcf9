"""Private names of torch and of frameworks that the trainer library uses: what each is for, what to do without it.

How they behave is pinned by `test_serialise.test_the_private_names_of_torch_are_what_we_take_them_for`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.torch_oldest import REQUIREMENTS

PACKAGE = Path(__file__).parents[2] / "trainer/stepkeeper_trainer"


@dataclass(frozen=True)
class Private:
    """One name, or one that is undocumented."""

    name: str  # `module:attribute.attribute`
    used_in: tuple[str, ...]
    instead: str  # what to do when torch has renamed it
    newer: bool = False  # the oldest torch that is supported does not have it, and the library does without


DCP = "torch.distributed.checkpoint"
PRIVATE = [
    Private(
        f"{DCP}.filesystem:_StorageInfo",
        ("describing",),
        "what `.metadata` says of a file's extent: find what FileSystemReader.read_data takes from storage_data, "
        "write that, and add its name to formats/metadata.py",
    ),
    Private(
        f"{DCP}.filesystem:CURRENT_DCP_VERSION",
        ("describing",),
        "the version in `.metadata`: see what FileSystemWriter.finish puts there",
        newer=True,
    ),
    Private(
        f"{DCP}.default_planner:create_default_local_save_plan",
        ("planner",),
        "DefaultSavePlanner().set_up_planner(state) and create_local_plan() give the same plan",
    ),
    Private(
        "torch.storage:_dtype_to_storage_type_map",
        ("serialise",),
        "the storage class that torch.save names for a dtype: unpickle a torch.save of one and look",
    ),
    Private(
        "torch.storage:_new_dtypes",
        ("serialise",),
        "dtypes that torch.save writes by _rebuild_tensor_v3: those whose untyped storage has no class of its own",
    ),
    Private(
        "torch:_utils._rebuild_tensor_v2",
        ("serialise",),
        "the function that a saved tensor names: unpickle a torch.save and look; the frames must name the same",
    ),
    Private("torch:_utils._rebuild_tensor_v3", ("serialise",), "as _rebuild_tensor_v2, for the newer dtypes"),
    Private(
        "torch:_foreach_copy_",
        ("copying", "snapshot"),
        "copy_ in a loop: slower for many small tensors (bench-checkpoint tells by how much)",
    ),
    Private(
        "torch.distributed.tensor:DTensor._local_tensor",
        ("tree",),
        "to_local() gives the same outside autograd, ten times slower for thousands of tensors",
    ),
    Private(
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        ("confirmation",),
        "the groups of parameters whose gradients a rank has computed and not yet reduced: hooks of each parameter",
    ),
    Private(
        "torch:Tensor._indices",
        ("confirmation",),
        "the indices of a sparse gradient as they are: coalesce() sums equal ones in an order that may vary",
    ),
    Private(
        "torch.distributed.tensor:DTensor._spec",
        ("staging",),
        "(device_mesh, placements, shape, stride()) compared one by one",
    ),
    Private(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        ("safetensors_io",),
        "where this rank's shard begins: sums of what torch.chunk gives the ranks before it",
    ),
    Private("torch:_C", ("snapshot", "random_state"), "the module of the next two"),
    Private(
        "torch._C:_nn.unflatten_dense_tensors",
        ("snapshot",),
        "[part.view(like.shape) for part, like in zip(flat.split([like.numel() for like in tensors]), tensors)]",
    ),
    Private("torch._C:_nn", ("snapshot",), "as unflatten_dense_tensors, which it holds"),
    Private(
        "torch._C:_cuda_hasPrimaryContext",
        ("random_state",),
        "torch.cuda.max_memory_reserved(device) > 0, where the allocator is not cudaMallocAsync",
    ),
    Private(
        "torch._C:_distributed_c10d",
        ("collectives",),
        "the module that has the flight recorders' dumps; without it a hang is told by the ranks' stacks alone",
    ),
    Private(
        "torch.distributed.distributed_c10d:_get_default_store",
        ("agreement", "groups"),
        "the store of the job, by which gloo's ranks find each other: a TCPStore of our own",
    ),
    Private(
        "torch.distributed.distributed_c10d:_get_default_group",
        ("groups",),
        "the script's own group, for its time limit; without it torch's usual limit counts",
    ),
    Private("torch.distributed:ProcessGroup._get_backend", ("groups",), "the same"),
    Private(
        "torch.distributed:ProcessGroup._set_default_backend",
        ("groups",),
        "how new_group makes a group; it can be used where no rank needs more than FAN_OUT sockets",
    ),
    Private("torch.distributed:ProcessGroup._register_backend", ("groups",), "the same"),
    Private("torch.distributed:ProcessGroup._set_group_name", ("groups",), "the same, for the flight recorder"),
    Private("torch.distributed:ProcessGroup._set_group_desc", ("groups",), "the same"),
    Private("torch._C._distributed_c10d:Backend.Options._timeout", ("groups",), "the same"),
    Private(
        "torch.nn:Module._load_from_state_dict",
        ("module",),
        "a class that overrides it shapes its buffers itself; without it such a resume is refused",
    ),
    Private(
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        ("position",),
        "the class of every DataLoader's iterators: type(iter(DataLoader([0]))).__mro__[1]",
    ),
]


OF_FRAMEWORKS = {
    "transformers": {
        "_init_training_state": "where _inner_training_loop learns from which epoch and batch it goes on",
        "_prepare_for_training": "where _inner_training_loop gets the wrapped model, the optimizer and the schedule",
        "_run_epoch": "the loop over the batches of an epoch, which skips those that a resume has behind it",
        "_load_rng_state": "what it calls where the generators are to be as in the checkpoint",
        "_save_checkpoint": "what it saves by where its callbacks say so",
        "_evaluate": "what it evaluates by there",
        "_load_callback_state": "for each callback with a `state`: from trainer.state.stateful_callbacks",
        "_tr_loss": "the sum of losses since the last log",
        "_total_loss_scalar": "the sum of those that were logged",
        "_globalstep_last_logged": "the step of the last log",
        "_initial_global_step": "the step that the mean loss at the end is counted from",
    },
    "lightning": {
        "_checkpoint_connector": "the object of the Trainer that has restore_training_state and restore_loops",
        "_loaded_checkpoint": "what its restore_loops and restore_callbacks read",
        "_data_fetcher": "what the fit loop runs its epoch loop with",
        "_load_combined_loader_states": "what the fit loop calls right before it first makes an iterator over the data",
    },
    "torchtitan": {
        "_should_save": "its own rule, which save() asks",
        "_should_purge": "its own rule, which it asks before it removes old steps",
    },
}
"""Private names of frameworks, and what to do when one is gone.

An engine asks for those that it uses before it begins, and refuses a framework that has not all of them.  The tests
in tests/frameworks run with the real ones.
"""


@pytest.mark.parametrize("private", PRIVATE, ids=lambda private: private.name)
def test_a_private_name_is_where_it_was(private: Private) -> None:
    module, _, path = private.name.partition(":")
    if path.startswith("_cuda_") and importlib.import_module("torch").version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    try:
        found = importlib.import_module(module)
        if path.startswith("DTensor."):
            assert path.split(".")[1] in {*found.DTensor.__slots__, *found.DTensor.__annotations__}, "no attribute"
            return
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, AssertionError) as error:
        if private.newer and torch.__version__.split("+")[0] == _oldest():
            return
        pytest.fail(f"torch has no {private.name} ({error}). In {', '.join(private.used_in)}: {private.instead}")


def _oldest() -> str:
    [line] = re.findall(r"^torch==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE)
    return str(line)


def test_no_other_private_name_of_torchs_is_used() -> None:
    used = {name for path in PACKAGE.rglob("*.py") for name in _private_names(path)}
    listed = {private.name.replace(":", ".").split(".")[-1] for private in PRIVATE}
    listed = {name for name in listed if name.startswith("_")}
    listed |= {"torch.distributed.tensor._utils", "_utils", "torch._C"}
    listed |= {name for names in OF_FRAMEWORKS.values() for name in names} - _own()  # some of ours are called as theirs

    assert used - listed == set(), "add it to PRIVATE, with what to do when it is gone"
    assert listed - used == set(), "used no more: take it off PRIVATE"


def test_an_engine_asks_for_each_private_name_of_its_framework_before_it_begins() -> None:
    for name, known in (("huggingface", OF_FRAMEWORKS["transformers"]), ("lightning", OF_FRAMEWORKS["lightning"])):
        path = PACKAGE / "engines" / f"{name}.py"
        tree = ast.parse(path.read_text())
        asked = {
            word for node in ast.walk(tree) if isinstance(node, ast.Constant) for word in str(node.value).split(".")
        }
        theirs = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        }
        assert theirs == known.keys(), f"{path.name}: say in OF_FRAMEWORKS what each is"
        assert theirs <= asked, f"{path.name}: add it to DOORS"


def _private_names(path: Path) -> Iterator[str]:
    """Yield private names of others: in imports from torch, and attributes that nothing of ours has."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            if "._" in (node.module or ""):
                yield str(node.module)
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("self", "cls", "os"):
                continue
            if (isinstance(root, ast.Name) and root.id == "torch") or node.attr not in _own():
                yield node.attr


def _own() -> set[str]:
    """Return all private names that the library gives itself."""
    if not _OWN:
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    _OWN.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                        _OWN.add(node.attr)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    _OWN.add(node.id)
    return _OWN


_OWN: set[str] = set()


# --- code in data ------------------------------------------------------------------------------------------------

UNPICKLING = {
    "load": ("pickle", "torch", "dill", "cloudpickle", "numpy", "np", "marshal", "dcp"),
    "loads": ("pickle", "dill", "cloudpickle", "marshal"),
    "open": ("shelve",),
}


OWN = [
    ("standby.py", "exec(code, main.__dict__)"),  # what the user has asked for: the training itself
    ("groups.py", "pickle.loads(data)"),  # from ranks of the same launch, as torch exchanges objects
]


def test_nothing_that_is_loaded_can_name_code() -> None:
    """No pickle is read but through an unpickler of ours that looks names up in a list, or torch's own such one."""
    bad: list[str] = []
    restricted = 0
    for package in (PACKAGE, PACKAGE.parents[1] / "supervisor/stepkeeper"):
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and (opens := list(_opens_code(node))):
                    if (path.name, ast.unparse(node)) not in OWN:
                        bad += [f"{path}:{node.lineno}: {why}" for why in opens]
                elif isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
                    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                    restricted += 1
                    if "find_class" not in methods:
                        bad.append(f"{path}:{node.lineno}: {node.name} looks up any name")

    assert bad == []
    assert restricted, "there are some: the test sees them"


def _opens_code(call: ast.Call) -> Iterator[str]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name not in {"eval", "exec", "Unpickler", *UNPICKLING}:
        return
    called = ast.unparse(call.func)
    root = called.rpartition(".")[0]
    if called in ("eval", "exec") or name == "Unpickler" or called == "Unpickler":
        yield called
    elif root in UNPICKLING.get(name, ()):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if (called, options.get("weights_only")) != ("torch.load", "True"):
            yield called


@pytest.mark.parametrize(
    "text",
    ["pickle.load(f)", "pickle.loads(b)", "torch.load(f)", "torch.load(f, weights_only=False)", "pickle.Unpickler(f)"],
)
def test_that_test_sees_what_it_should(text: str) -> None:
    [call] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]

    assert list(_opens_code(call))

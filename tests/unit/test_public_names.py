"""What a user sees of `import edge_runtime`: the public names, imported when they are used, and their help."""

from __future__ import annotations

import subprocess
import sys

import edge_runtime


def test_dir_has_the_public_names_before_any_is_imported() -> None:
    program = (
        "import edge_runtime, sys\n"
        "print(*[name for name in dir(edge_runtime) if not name.startswith('_')])\n"
        "print(*[name for name in ('numpy', 'zmq', 'msgspec', 'grpc') if name in sys.modules])\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "AsyncClient Client MqttClient OipClient Runtime\n\n"


def test_the_help_reports_what_each_public_class_is_for() -> None:
    assert edge_runtime.__doc__ is not None
    told = [line.split()[0] for line in edge_runtime.__doc__.splitlines() if line and not line.startswith(" ")]
    assert set(edge_runtime.__all__) - {"__version__"} <= set(told)

"""The settings of each profiler are those that its code takes, with the same defaults."""

import importlib
import inspect

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from perfexp.host import installation
from perfexp.plan import config

pytestmark = pytest.mark.usefixtures("quick_commands")


@pytest.mark.parametrize("option", ["nsys", "ncu", "torch", "nvtx"])
def test_profiler_schema_matches_the_arguments_and_defaults(option):
    config.register()
    with initialize_config_dir(config_dir=str(installation.conf_dir()), version_base="1.3"):
        plain = config.plan_of(compose(config_name="config", overrides=[f"profiler={option}"]), {})[
            "profiler"
        ]
    node = ConfigStore.instance().load(f"schema/profiler/{option}.yaml").node
    module, _, name = plain["_target_"].rpartition(".")
    taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert set(taken) == set(node) - {"_target_"}
    for key, parameter in taken.items():
        default = (
            list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        )
        assert node[key] == default, key
        assert plain[key] == default, key
    assert config.build(plain).name == option

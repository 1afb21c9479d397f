"""Hydra's compositions of perfexp's own configuration, each part made once: most of a short test is Hydra's work.

What Hydra does with the words of a command is as ever: they are parsed, looked at and applied each time. Remembered is
what does not depend on them: the content of a file of `conf/`, the files that chosen groups lead to, these files
merged, the schemas, and whether the files of chosen groups set a sweep, for which Hydra composes everything once more.
With a folder of a user, whose files may change, nothing is remembered.
"""

import copy
from contextlib import contextmanager

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore

from perfexp.host.installation import conf_dir

#: Where the configuration comes from if no folder of a user is among the sources.
_OWN = ["hydra.conf", str(conf_dir()), ""]
_results, _lists, _merged, _stored, _modes = {}, {}, {}, {}, {}
_load_config = ConfigRepository.load_config
_create_defaults_list = config_loader_impl.create_defaults_list
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_store = ConfigStore.store
_get_mode = Hydra.get_mode


@contextmanager
def remembered():
    """Within the block, compositions of this process remember one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", _loaded)
        patch.setattr(config_loader_impl, "create_defaults_list", _listed)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _composed)
        patch.setattr(ConfigStore, "store", _stored_once)
        patch.setattr(Hydra, "get_mode", _mode)
        # each composition copies its sources, and every schema with them, lest the list of them is changed
        patch.setattr(
            ConfigRepository, "__deepcopy__", lambda repo, memo: copy.copy(repo), raising=False
        )
        yield


def _is_own(repo):
    return [source.path for source in repo.get_sources()] == _OWN


def _loaded(repo, config_path):
    if not _is_own(repo):
        return _load_config(repo, config_path)
    if config_path not in _results:
        _results[config_path] = _load_config(repo, config_path)
    return copy.deepcopy(_results[config_path])


def _listed(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    given = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
    if not _is_own(repo):
        return _create_defaults_list(*given)
    overrides = Overrides(repo=repo, overrides_list=overrides_list)
    values = {id(override) for override in overrides.config_overrides}
    groups = [
        each for each in overrides_list if id(each) not in values and not each.is_sweep_override()
    ]
    key = (config_name, tuple(each.input_line for each in groups), prepend_hydra, skip_missing)
    if key not in _lists:
        _lists[key] = _create_defaults_list(*given)
    known = _lists[key]
    return DefaultsList(
        defaults=known.defaults,
        defaults_tree=known.defaults_tree,
        config_overrides=overrides.config_overrides,
        overrides=known.overrides,
    )


def _composed(loader, defaults, repo):
    if not _is_own(repo):
        return _compose(loader, defaults, repo)
    key = tuple(
        (each.config_path, each.package, each.parent, each.is_self, each.primary)
        for each in defaults
    )
    if key not in _merged:
        _merged[key] = _compose(loader, defaults, repo)
    return copy.deepcopy(_merged[key])


def _stored_once(store, name, node, group=None, package=None, provider=None):
    place = (group, name, package, provider)
    if _stored.get(place) is not node:
        _store(store, name=name, node=node, group=group, package=package, provider=provider)
        _stored[place] = node


def _mode(hydra, config_name, overrides):
    repo = hydra.config_loader.repository
    if not _is_own(repo):
        return _get_mode(hydra, config_name, overrides)
    names = {text: text.lstrip("+~").partition("=")[0].partition("@")[0] for text in overrides}
    key = tuple(
        text for text, name in names.items() if name.startswith("hydra") or repo.group_exists(name)
    )
    if key not in _modes:
        _modes[key] = _get_mode(hydra, config_name, list(overrides))
    return _modes[key]

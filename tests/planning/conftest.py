"""Plans read models without weights, of which each takes a second to build if it is a published one."""

import copy

import pytest

from llamoe.planning import nodes, one_machine, units


@pytest.fixture(scope="session", autouse=True)
def built_once():
    """Each is built once; plans of nodes change theirs, and get a copy."""
    built, build = {}, units.build

    def once(config):
        key = type(config), config.to_json_string(use_diff=False)
        if key not in built:
            built[key] = build(config)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (units, one_machine):
            patch.setattr(module, "build", once)
        patch.setattr(nodes, "build", lambda config: copy.deepcopy(once(config)))
        yield

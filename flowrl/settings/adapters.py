"""Settings of adapters, under the name by which scripts of users know them."""

from flowrl.settings.model.adapters import FrozenAdapter as FrozenAdapter

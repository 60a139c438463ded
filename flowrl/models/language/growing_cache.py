"""A cache of keys and values that is not copied at every token."""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from flowrl.models.language.vision import reads_images


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` that writes new tokens behind the old ones, in memory with room for more.

    transformers' own joins both into new memory at every token. `keys` and `values` [b h s d] are
    views of that memory, which doubles when it is full, up to `most` tokens; where another method
    has replaced them, new memory is reserved."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.rooms: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys, self.values
        if keys is None or values is None or keys.numel() == 0:  # prompts
            return super().update(key_states, value_states, *args, **kwargs)
        rooms = self.rooms or (keys, values)
        self.keys, room = _appended(rooms[0], keys, key_states, self.most)
        self.values, other = _appended(rooms[1], values, value_states, self.most)
        self.rooms = room, other
        return self.keys, self.values


def _appended(
    room: Float[Tensor, "..."],
    old: Float[Tensor, "b h s d"],
    new: Float[Tensor, "b h n d"],
    most: int,
) -> tuple[Float[Tensor, "b h s+n d"], Float[Tensor, "b h r d"]]:
    """`old` and then `new`, as a view of memory, and that memory: `room` if `old` is its beginning
    and it is large enough."""
    seen, width = old.shape[-2], old.shape[-2] + new.shape[-2]
    begins = room.data_ptr() == old.data_ptr() and room.stride() == old.stride()
    if not begins or room.shape[-2] < width:
        room = old.new_empty(*old.shape[:-2], max(width, min(2 * width, most)), old.shape[-1])
        room[..., :seen, :] = old
    room[..., seen:width, :] = new
    return room[..., :width, :], room


def rows_can_leave(model: Any) -> bool:
    """Whether rows can leave a call of `generate`: its cache holds keys and values of tokens rather
    than states, and positions are of tokens, not of images."""
    if model._is_stateful or reads_images(model.config):
        return False
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def growing_cache(model: Any, most: int) -> DynamicCache:
    """An empty cache for texts of at most so many tokens, of a model whose rows can leave; sliding
    windows are transformers' own."""
    cache = DynamicCache(config=model.config.get_text_config())
    cache.layers = [
        GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache

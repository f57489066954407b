"""Which decoder layers each pipeline stage holds."""

from functools import lru_cache

from vcli.topology.errors import ConfigError


@lru_cache(maxsize=256)
def layer_ranges(
    num_layers: int, num_stages: int, partition: tuple[int, ...] | None = None
) -> tuple[range, ...]:
    """The layers of each stage, first to last; `partition` gives their number per stage.

    Layers that are left over go one each to the stages before the last, backwards from the last
    but one: the last stage also has the LM head, and the first the embedding.

    Raises:
        ConfigError: a stage would be empty, or the partition does not add up.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers",
            hint=f"--pipeline-parallel-size 1..{num_layers}",
        )
    if partition is None:
        base, rest = divmod(num_layers, num_stages)
        first_longer = num_stages - 1 - rest
        counts = tuple(
            base + (first_longer <= stage < num_stages - 1) for stage in range(num_stages)
        )
    else:
        _check_partition(num_layers, num_stages, partition)
        counts = partition
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return tuple(ranges)


def _check_partition(num_layers: int, num_stages: int, partition: tuple[int, ...]) -> None:
    shown = ",".join(map(str, partition))
    even = ",".join(str(len(layers)) for layers in layer_ranges(num_layers, num_stages))
    if len(partition) != num_stages or min(partition) < 1:
        raise ConfigError(
            f"pp_layer_partition={shown} must be {num_stages} numbers above 0, one for each stage",
            hint=f"an even one is {even}",
        )
    if sum(partition) != num_layers:
        raise ConfigError(
            f"pp_layer_partition={shown} adds up to {sum(partition)} layers, "
            f"the model has {num_layers}",
            hint=f"an even one is {even}",
        )

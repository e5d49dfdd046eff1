"""Message sums on Trainium, in NKI 0.7: tiles of 128 nodes by 16 slots are summed over the slots.

Legend: R rows (nodes to reduce for), K slots of a row, F features, P rows of a tile, S slots of a part.
"""

import numpy as np

from tilewright.kernels.gather_reduce.nki import PARTITIONS, NkiTransfers, each_tile, installed, rows_at, slots_of_part

_, nisa, nl = installed()


def kernel(messages, mask, part):
    """Sums, for each row, the messages that its mask marks.

    Args:
        messages: `[R, K, F]` in HBM.
        mask: `[R, K]` uint8, 1 for valid slots and 0 for padding, which may hold anything.
        part: S.

    Returns:
        `[R, F]` in HBM, in the dtype of `messages`, summed in float32.
    """
    rows, slots, features = messages.shape
    out = nl.ndarray((rows, features), dtype=messages.dtype, buffer=nl.shared_hbm)

    def tile(first, size):
        counts = nl.ndarray((size, slots), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.dma_copy(dst=counts, src=rows_at(mask, first, size))
        total = nl.ndarray((size, features), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        for begin in range(0, slots, part):
            width = min(part, slots - begin)
            loaded = nl.ndarray((size, width, features), dtype=messages.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=loaded, src=rows_at(messages, first, size, begin, width))
            # A product with the mask would keep NaN of padding, hence the predicated copy. The mask repeats for all features.
            counted = nl.ndarray((size, width, features), dtype=messages.dtype, buffer=nl.sbuf)
            nisa.memset(dst=counted, value=0.0)
            repeated = counts.ap(pattern=[[slots, size], [1, width], [0, features]], offset=begin)
            nisa.tensor_copy_predicated(dst=counted, src=loaded, predicate=repeated)
            added = nl.ndarray((size, features), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=added, op=nl.add, data=counted.permute((0, 2, 1)), axis=(2,))
            nisa.tensor_tensor(dst=total, data1=total, data2=added, op=nl.add)
        result = nl.ndarray((size, features), dtype=messages.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=result, src=total)
        nisa.dma_copy(dst=rows_at(out, first, size), src=result)

    each_tile(nl.fori_loop, rows, tile)
    return out


def transfers(rows: int, slots: int, features: int, itemsize: int = 4) -> NkiTransfers:
    """Counts the kernel's DMA transfers from its structure; a row's slots of a part are one contiguous run.

    Args:
        itemsize: bytes per element of a message.
    """
    # Parts, mask, result.
    tiles = -(-rows // PARTITIONS)
    each_tile = -(-slots // slots_of_part(slots, features)) + 2
    read = rows * slots * (features * itemsize + 1)
    return NkiTransfers(tiles * each_tile, rows * each_tile, read, rows * features * itemsize)


def operands(messages: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Converts the operands of the other implementations to the kernel's."""
    mask = (np.arange(messages.shape[1]) < degrees[:, None]).astype(np.uint8)
    return messages, mask, slots_of_part(messages.shape[1], messages.shape[2])

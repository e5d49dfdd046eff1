from .aggregate import propagate as propagate
from .attention import attend as attend
from .attention import segment_softmax as segment_softmax
from .loader import DataLoader as DataLoader
from .loader import LinkNeighborLoader as LinkNeighborLoader
from .loader import NeighborLoader as NeighborLoader
from .loader import node_data as node_data
from .messages import MessagePassing as MessagePassing
from .messages import softmax as softmax
from .relations import RelationTable as RelationTable
from .table import NeighborTable as NeighborTable

__all__: list[str]

"""The library's errors, by the names that C++ has for them. Each is a RuntimeError."""

import builtins

from tessera._library import ops


class Error(RuntimeError):
    """What the library raises on purpose: what was asked, what the limit is, and what to do."""


class InvalidArgument(Error, ValueError):
    """An argument that the caller can correct: a wrong size, an unknown name, a rank out of range."""


class RangeError(InvalidArgument):
    """An index beyond the end of a dataset or a file."""


class VariableError(InvalidArgument):
    """A variable or an attribute that a source of data does not have; names those that it has."""


class ScheduleSyntaxError(InvalidArgument):
    """The text of a pipeline schedule that cannot be read; says where."""


class ConfigurationError(Error):
    """A configuration (environment, file, tree of groups) that is incomplete or contradicts itself."""


class ConfigFileError(ConfigurationError):
    """A configuration file that does not hold what it should; says where in it."""


class GroupConfigError(ConfigurationError):
    """A tree of groups that cannot be."""


class WorldSizeMismatch(GroupConfigError):
    """The sizes of a tree do not make the world."""


class UnsetSize(GroupConfigError):
    """A leaf of a tree has no size."""


class RepeatedName(GroupConfigError):
    """Two nodes of a tree have one name."""


class UnknownName(GroupConfigError):
    """A name that no node of the tree has."""


class GroupCycle(GroupConfigError):
    """A node of a tree is below itself."""


class OrthogonalityError(GroupConfigError):
    """Groups that were said to be orthogonal are not."""


class ViewMismatch(OrthogonalityError):
    """Other axes whose product is another number of ranks."""


class MappingError(ConfigurationError):
    """Ranks cannot be mapped to these slots."""


class ParallelismError(ConfigurationError):
    """Sizes of parallel groups that do not fit the world."""


class FileError(Error):
    """A file that is absent, unreadable, of another format, or damaged."""


class CheckpointDamaged(FileError):
    """The checkpoint to go on from cannot be read."""


class NotAvailable(Error):
    """A part that this build does not have; says how to get it."""


class CommError(Error):
    """A failure between ranks; names the group, the operation and its number."""


class RendezvousError(CommError):
    """The ranks could not meet."""


class TimeoutError(CommError, builtins.TimeoutError):
    """A wait ran into its limit; names the ranks that did not come, where they are known."""


class PeerLostError(CommError):
    """A rank of the group died, raised or aborted."""


class PeerFailedError(PeerLostError):
    """A rank of the group met an error, and the group is sound: where all ranks catch it, it goes on."""


class MismatchError(CommError):
    """Ranks called different things, or with arguments that do not fit together."""


class ShardingError(Error):
    """An operation that the placements of its tensors do not allow."""


class NoRuleError(ShardingError):
    """An operator without a sharding rule was given sharded tensors."""


class ImplicitRedistributionError(ShardingError):
    """An operator would move shards by itself, and the policy `redistribution` is "error"."""


class RuleError(Error):
    """A sharding rule contradicts its operator."""


class GradientError(Error):
    """Gradients that would come together wrongly; names the parameter, and says how to reduce it."""


class SampleError(Error):
    """What a dataset raised while it read a sample, whose index is in the message."""


class StalledError(Error):
    """The source of a loader did not deliver a batch within the limit."""


class UnevenDataError(Error):
    """Streams of the ranks end at different steps."""


class ScheduleError(Error):
    """A pipeline schedule that cannot run."""


class PipelineError(Error):
    """A step of a pipeline failed."""


class CheckpointBusy(Error):
    """An earlier save is still being written, and the options say to refuse."""


class CheckpointLocked(Error):
    """Another job saves or removes a checkpoint in the folder at this moment."""


class NonFiniteGradient(Error):
    """The gradients of a step are infinite or NaN."""


NAMES = list(ops.error_names())
ops.set_error_classes([id(globals()[name]) for name in NAMES])  # the module's classes outlive the library's use

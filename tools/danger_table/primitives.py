"""The harmful functions from which all others follow: builtins, C functions, and some functions of Python's modules."""

from __future__ import annotations

__all__ = ["ALWAYS", "HARMFUL", "HARMLESS", "IN_C", "METHODS", "is_alone", "is_always", "is_harmful", "is_harmless"]

_OS = (
    "_exit", "abort", "add_dll_directory", "chdir", "chflags", "chmod", "chown", "chroot", "execl", "execle",
    "execlp", "execlpe", "execv", "execve", "execvp", "execvpe", "fchdir", "fchmod", "fchown", "fdopen", "fork",
    "forkpty", "kill", "killpg", "lchflags", "lchmod", "lchown", "link", "makedirs", "mkdir", "mkfifo", "mknod",
    "open", "popen", "posix_spawn", "posix_spawnp", "putenv", "remove", "removedirs", "removexattr", "rename",
    "renames", "replace", "rmdir", "setxattr", "spawnl", "spawnle", "spawnlp", "spawnlpe", "spawnv", "spawnve",
    "spawnvp", "spawnvpe", "startfile", "startfile2", "symlink", "system", "truncate", "ftruncate", "unlink",
    "unsetenv", "utime", "write", "writev", "pwrite", "sendfile", "environ.update", "environ.__setitem__",
)  # a table  # fmt: skip

#: Full names. A name that ends with a dot stands for everything below it.
HARMFUL = frozenset(
    [
        *(f"{module}.{name}" for module in ("os", "posix", "nt") for name in _OS),
        *(f"builtins.{name}" for name in ("__import__", "eval", "exec", "open", "execfile")),
        # running code
        *(f"{module}.{name}" for module in ("_pickle", "pickle", "cPickle") for name in (
            "load", "loads", "Unpickler", "_Unpickler", "_load", "_loads",
        )),
        "marshal.load", "marshal.loads", "types.FunctionType", "types.CodeType", "types.LambdaType",
        "importlib.import_module", "importlib.__import__", "importlib._bootstrap._gcd_import", "_imp.", "imp.",
        "_frozen_importlib.", "zipimport.zipimporter", "_thread.start_new_thread", "_thread.start_new",
        "_thread.start_joinable_thread",
        "_ctypes.", "ctypes.CDLL", "ctypes.PyDLL", "ctypes.cdll", "ctypes.pydll", "ctypes.windll", "ctypes.memmove",
        "ctypes.memset", "_cffi_backend.", "_tkinter.create", "_interpreters.", "_xxsubinterpreters.",
        "subprocess.Popen", "_posixsubprocess.fork_exec", "_winapi.", "winreg.", "msvcrt.",
        "_testcapi.", "_testinternalcapi.", "sqlite3.connect", "_sqlite3.connect", "_sqlite3.Connection",
        *(f"signal.{name}" for name in (
            "alarm", "pidfd_send_signal", "pthread_kill", "raise_signal", "set_wakeup_fd", "setitimer", "siginterrupt",
            "signal",
        )), "_signal.",
        "_remote_debugging.", "sys.remote_exec", "atexit.register",
        # files and the network
        "io.open", "io.FileIO", "io.open_code", "_io.open", "_io.FileIO", "_io.open_code", "_pyio.open",
        "mmap.mmap", "fcntl.", "termios.", "resource.setrlimit", "_dbm.open", "_gdbm.open",
        "socket.socket", "_socket.socket", "socket.create_connection", "socket.create_server", "socket.fromfd",
        "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.gethostbyname_ex",
        "socket.getnameinfo", "_socket.getaddrinfo", "_socket.gethostbyname", "_ssl.", "_posixshmem.",
        "_multiprocessing.", "_overlapped.",
        "numpy.fromfile", "numpy._core.multiarray.fromfile", "numpy._core._multiarray_umath.fromfile",
        # C functions of torch that read or write files, or compile and run their arguments
        *(f"torch._C.{name}" for name in (
            "CompilationUnit", "DeserializationStorageContext", "PyTorchFileReader", "PyTorchFileWriter",
            "_aoti.", "_create_module_with_type", "_get_graph_executor_optimize", "_import_ir_module_from_package",
            "_jit_compile_backend", "_jit_script_class_compile", "_jit_script_compile", "_load_for_lite_interpreter",
            "_load_for_lite_interpreter_from_buffer", "_load_jit_module_from_bytes", "_load_jit_module_from_file",
            "_load_mobile_module_from_bytes", "_load_mobile_module_from_file", "_run_emit_module_hook",
            "_import_py", "import_ir_module", "import_ir_module_from_buffer", "parse_ir",
            "_save_jit_module", "_save_mobile_module", "_save_parameters", "_load_parameters",
            "_export_operator_list", "_profiler.", "_cuda_attach_out_of_memory_observer",
            "_distributed_c10d.FileStore", "_distributed_c10d.TCPStore", "_distributed_rpc.",
        )),
        "xml.sax.parse",
        "networkx.utils.decorators.open_file",  # a decorator that opens a file argument
        "torch.from_file", "torch.UntypedStorage.from_file", "torch._C.StorageBase.from_file",
        "torch._C._VariableFunctions.from_file", "torch.ops.load_library", "torch.classes.load_library",
    ]
)  # a table  # fmt: skip

#: Functions that do harm with any arguments.
ALWAYS = frozenset(
    [
        *(f"{module}.{name}" for module in ("os", "posix", "nt") for name in ("_exit", "abort", "fork", "forkpty")),
        "builtins.breakpoint", "builtins.input", "faulthandler._sigsegv", "faulthandler._sigabrt", "pdb.set_trace",
    ]
)  # a table  # fmt: skip

#: Names of methods that count as harmful for objects of any class.
METHODS = frozenset(
    [
        "CDLL", "check_call", "check_output", "copyfile", "create_module",
        "dlopen", "enable_load_extension", "exec_module", "extractall", "extractfile", "get_code",
        "hardlink_to", "import_module", "load_extension", "load_library", "load_module", "LoadLibrary", "makefile",
        "popen", "Popen", "request", "retrieve", "rmdir", "rmtree", "run_module", "run_path", "run_script", "runcall",
        "runcode", "runctx", "runeval", "runsource", "sendmail", "sendto", "spawn", "storbinary", "symlink_to",
        "system", "tofile", "touch", "unlink", "urlopen", "urlretrieve", "write_bytes", "write_text",
    ]
)  # a table  # fmt: skip

#: Harmful functions whose callers are not harmful.
ALONE = frozenset(
    [
        "torch.distributed.distributed_c10d._tensor_to_object",  # callers pass data that other processes have sent
    ]
)  # a table  # fmt: skip

#: Harmful methods that are written in C, or stand for such methods: they write arrays and storages to files.
IN_C = frozenset(["_share_filename_cpu_", "_write_file", "dump", "tofile"])


def is_alone(name: str) -> bool:
    """Return whether the function with the full name `name` is harmful, but not its callers."""
    return name in ALONE


def is_harmful(name: str) -> bool:
    """Return whether the object with the full name `name` does harm with its arguments."""
    if name in HARMFUL:
        return True
    words = name.split(".")
    return any(".".join(words[:end]) + "." in HARMFUL for end in range(1, len(words)))


def is_always(name: str) -> bool:
    """Return whether the object with the full name `name` does harm with any arguments."""
    return name in ALWAYS


#: Reviewed and harmless: they check the arguments that they pass on, or only display them.
HARMLESS = frozenset(
    [
        "collections.namedtuple",  # evaluates only names that are valid identifiers
        "typing.NamedTuple", "typing._make_nmtuple",
        "warnings.warn", "warnings.warn_explicit", "warnings._showwarnmsg", "warnings._deprecated",
        "zoneinfo.",  # reads only files below the folders of time zones
        # evaluate or read only the source of existing functions
        "inspect._signature_fromstr", "inspect.get_annotations", "inspect.findsource", "inspect.getsourcefile",
        # torch.save writes these for compiled models; they only compile existing functions
        *(f"torch._dynamo.eval_frame.{name}." for name in (
            "OptimizedModule", "OptimizeContext", "_TorchDynamoContext",
        )),
        *(f"torch._dynamo.convert_frame.{name}." for name in (
            "CatchErrorsWrapper", "ConvertFrame", "ConvertFrameAssert",
        )),
        # looks up the module of a device, and notifies the other processes of the run
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor.",
        # the result must be a module or a parameter
        *(f"torch.nn.modules.module.Module.{name}" for name in (
            "__setattr__", "get_buffer", "get_parameter", "get_submodule", "set_submodule",
        )),
    ]
)  # a table  # fmt: skip


def is_harmless(name: str) -> bool:
    """Return whether the function with the full name `name` was reviewed and found harmless."""
    words = name.split(".")
    return name in HARMLESS or any(".".join(words[:end]) + "." in HARMLESS for end in range(1, len(words)))

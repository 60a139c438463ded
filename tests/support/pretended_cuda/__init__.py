"""A CUDA device on a CPU-only torch: tensors that say `cuda:0` and hold host memory.

Made by a wrapper subclass (`torch.Tensor._make_wrapper_subclass`) and a dispatch mode. Open
registration (`PrivateUse1`) was not taken: its tensors say `privateuseone` or a name of one's own,
so no branch of ours or of a library that asks for "cuda" would run. Autograd wants a device guard
and hooks for the device; they are compiled from `device.cpp` when the device is first used, and
loaded before torch, which looks for them once.

`compiled.load()` and `runtime.install()` are for a whole process. Operations that mix devices raise
`ledger.DeviceMix`; what a GPU would wait for or copy is counted in a `ledger.Ledger`.
"""

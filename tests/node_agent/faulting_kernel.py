"""A kernel that writes where nothing is mapped, by the CUDA driver API alone: the fault of a program, made for real.

    python tests/node_agent/faulting_kernel.py

Ends with 0 when the GPU refused the access, as it should; with 2 where there is no CUDA driver or GPU.
"""

import ctypes
import sys

KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry bad()
{
    .reg .b64 %address;
    mov.b64 %address, 0;
    st.global.u32 [%address], 7;
    ret;
}
"""
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719
NO_DEVICE = 2


def main() -> int:
    """Run it on GPU 0."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(error, file=sys.stderr)
        return NO_DEVICE
    device, context, module, function = (ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p())
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        print("no GPU", file=sys.stderr)
        return NO_DEVICE
    for name, code in (
        ("cuCtxCreate", cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)),
        ("cuModuleLoadData", cuda.cuModuleLoadData(ctypes.byref(module), KERNEL)),
        ("cuModuleGetFunction", cuda.cuModuleGetFunction(ctypes.byref(function), module, b"bad")),
        ("cuLaunchKernel", cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)),
    ):
        if code:
            print(f"{name}: error {code}", file=sys.stderr)
            return 1
    code = cuda.cuCtxSynchronize()
    print(f"cuCtxSynchronize: error {code}")
    return 0 if code in (ILLEGAL_ADDRESS, LAUNCH_FAILED) else 1


if __name__ == "__main__":
    sys.exit(main())

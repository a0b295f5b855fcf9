"""Reading the kernel log, NVML and sysfs.  Sensors only report (`readings`); none can hang the program."""

#!/bin/sh
# Usage: newest.sh ROOT OUT MIRROR, as root, in mount and process namespaces of its own: no mount can outlive it.
#
# Takes the newest Slurm from Debian's unstable suite, builds pyslurm against it, and leaves in OUT what runs on this
# machine as it is: each program names its own loader and libraries there, so no chroot is needed to run them, and what
# they start (jobs, shells, Python) is this machine's.
set -eu
umask 022
ROOT=$1 OUT=$2 MIRROR=$3
PYSLURM=25.11.2  # the newest; made for Slurm 25.11, the macros below bridge what 26.05 renamed

mount --make-rprivate /
debootstrap --variant=minbase sid "$ROOT" "$MIRROR"
mountpoint -q "$ROOT/proc" || mount -t proc proc "$ROOT/proc"
cat >"$ROOT/etc/apt/apt.conf.d/90lab" <<'CONF'
Acquire::Check-Valid-Until "false";
Acquire::Check-Date "false";
APT::Install-Recommends "false";
CONF
printf '#!/bin/sh\nexit 101\n' >"$ROOT/usr/sbin/policy-rc.d"
chmod 755 "$ROOT/usr/sbin/policy-rc.d"
cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$ROOT/host-ca.crt"

cat >"$ROOT/inside.sh" <<'INSIDE'
set -eu
umask 022
OUT=$1 PYSLURM=$2
export DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root
unset PIP_FIND_LINKS  # a directory of this machine
apt-get update -q
apt-get install -y -q slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm-dev patchelf gcc libc6-dev \
    python3-dev python3-pip python3-setuptools python3-wheel python3-packaging cython3
[ ! -e /host-ca.crt ] || cp /host-ca.crt /etc/ssl/certs/ca-certificates.crt  # whom this machine trusts

# pyslurm's setup.py scans the lines of this header for the version, the compiler skips them
mkdir -p /shim/slurm
cat >/shim/slurm/slurm_version.h <<'SHIM'
#if 0
#define SLURM_VERSION_NUMBER 0x190b00
#endif
#include_next <slurm/slurm_version.h>
SHIM
triplet=$(gcc -print-multiarch)
export SLURM_LIB_DIR=/usr/lib/$triplet SLURM_INCLUDE_DIR=/shim PYSLURM_BUILD_JOBS=2
export CFLAGS="-O1 -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf"
export CFLAGS="$CFLAGS -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=2007"
pip wheel --quiet --no-deps --no-build-isolation -w /wheels "pyslurm==$PYSLURM"

mkdir -p "$OUT/bin" "$OUT/lib" "$OUT/plugins" "$OUT/python/bin" "$OUT/python/lib/python3/dist-packages"
for name in sacct salloc sbatch scancel scontrol sinfo squeue srun slurmctld slurmd slurmstepd; do
    cp -L "$(command -v "$name")" "$OUT/bin/$name"
done
cp -L "/usr/lib/$triplet/slurm-wlm"/*.so "$OUT/plugins/"
python=$(readlink -f /usr/bin/python3)
cp "$python" "$OUT/python/bin/python3"
cp -r "/usr/lib/${python##*/}" "$OUT/python/lib/"
rm -rf "$OUT/python/lib/${python##*/}/test" "$OUT/python/lib/${python##*/}"/config-*
pip install --quiet --no-deps --no-index --target "$OUT/python/lib/python3/dist-packages" /wheels/pyslurm-*.whl

find "$OUT/bin" "$OUT/plugins" "$OUT/python" -type f \( -perm -1 -o -name '*.so' \) | while read -r file; do
    [ "$(head -c 4 "$file" | tail -c 3)" = ELF ] && echo "$file"
done >/elf || true
loader=$(patchelf --print-interpreter /usr/bin/srun)
cp -L "$loader" "$OUT/lib/"
LD_LIBRARY_PATH="$OUT/plugins" xargs -n 1 ldd </elf | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -v "^$OUT/" | xargs cp -L -t "$OUT/lib/"
while read -r file; do
    patchelf --force-rpath --set-rpath "$OUT/lib:$OUT/plugins" "$file"
    case $file in
        "$OUT"/bin/* | "$OUT"/python/bin/*) patchelf --set-interpreter "$OUT/lib/${loader##*/}" "$file" ;;
    esac
done </elf
slurmctld -V >"$OUT/version"
INSIDE
chroot "$ROOT" sh /inside.sh "$OUT" "$PYSLURM"
mkdir -p "${OUT%/*}"
mv "$ROOT$OUT" "$OUT"

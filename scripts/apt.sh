# Sourced by the set-up scripts: apt_install PACKAGE...

# Installs packages as root with three tries (package mirrors fail now and then); as another user prints the command and exits 3.
apt_install() {
    local command="apt-get install --yes --no-install-recommends $*" try
    if ! command -v apt-get >/dev/null; then
        echo "error: missing system packages: $* (Debian's names); apt-get is not available to install them" >&2
        echo "  fix: install them with this machine's package manager, then run make again" >&2
        return 3
    fi
    if [[ $(id -u) != 0 ]]; then
        echo "error: missing system packages: $*" >&2
        echo "  fix: sudo sh -c 'apt-get update && $command', then run make again" >&2
        return 3
    fi
    export DEBIAN_FRONTEND=noninteractive
    local log
    log=$(mktemp)
    for try in 1 2 3; do
        echo "system packages: installing $* (try $try)"
        if { apt-get update -qq && $command; } >"$log" 2>&1 </dev/null; then
            rm -f "$log"
            return 0
        fi
        sleep $((try * 3))
    done
    tail -n 15 "$log" >&2
    rm -f "$log"
    echo "error: apt-get could not install: $*" >&2
    echo "  fix: see the lines above; run as root: apt-get update && $command" >&2
    return 1
}

#!/usr/bin/env bash
# Keys and certificates for the broker, its devices and its clients. Run again it keeps what there is.
set -euo pipefail

usage() {
  cat <<'TEXT'
make-certificates.sh [--folder DIR] broker NAME_OR_ADDRESS...   the broker's, for every name it is reached by
make-certificates.sh [--folder DIR] device ID...                one for each device; its id is the certificate's CN
make-certificates.sh [--folder DIR] client NAME...              one for each client; the CN is "client-NAME"

Writes below DIR (./certificates):
  authorities/      three authorities: broker, devices, clients. Keep the folder off-line: who has it is anybody.
  broker/           what the broker needs: its key, its certificate, whom it believes
  devices/ID/       what a device needs: ca.crt, device.crt, device.key
  clients/NAME/     what a client needs: ca.crt, client.crt, client.key

A key is never overwritten. A certificate is made again, for the same key, when it is missing, has less than 30 days
left, or the broker's names have changed. An ID has 1 to 64 letters, digits, '_' or '-', a NAME at most 57.
TEXT
}

AUTHORITY_DAYS=3650
CERTIFICATE_DAYS=825 # what the strictest of the common TLS libraries takes from a private authority
RENEW_S=$((30 * 24 * 3600))

fail() {
  echo "make-certificates.sh: $*" >&2
  exit 2
}

# Everything appears under its name whole: a run that was cut off leaves a file *.new, which the next one replaces.
make_key() { # KEY
  [ -e "$1" ] && return
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.new"
  mv "$1.new" "$1"
  echo "made  $1"
}

is_good() { # CERTIFICATE KEY: there, of this key, with time left
  [ -e "$1" ] && openssl x509 -in "$1" -noout -checkend "$RENEW_S" >/dev/null &&
    [ "$(openssl x509 -in "$1" -noout -pubkey)" = "$(openssl pkey -in "$2" -pubout)" ]
}

make_authority() { # broker|devices|clients
  local path="authorities/$1"
  mkdir -p authorities
  make_key "$path.key"
  if is_good "$path.crt" "$path.key"; then return; fi
  openssl req -x509 -new -key "$path.key" -days "$AUTHORITY_DAYS" -out "$path.crt.new" -config - <<TEXT
[req]
prompt = no
distinguished_name = name
x509_extensions = extensions
[name]
CN = edge-runtime $1 authority
[extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
TEXT
  mv "$path.crt.new" "$path.crt"
  echo "made  $path.crt"
}

# Who shows it (clientAuth or serverAuth) is part of a certificate: a device's cannot stand for a broker.
make_certificate() { # PATH AUTHORITY CN USAGE [NAMES]
  local path="$1" authority="authorities/$2" names="${5:-}" said
  mkdir -p "$(dirname "$path")"
  make_key "$path.key"
  if is_good "$path.crt" "$path.key" && has_names "$path" "$names" &&
    openssl verify -CAfile "$authority.crt" "$path.crt" >/dev/null 2>&1; then
    echo "kept  $path.crt"
    return
  fi
  said=$(
    openssl req -new -key "$path.key" -subj "/CN=$3" -config <(printf '[req]\ndistinguished_name = name\n[name]\n') |
      openssl x509 -req -CA "$authority.crt" -CAkey "$authority.key" -set_serial "0x01$(openssl rand -hex 15)" \
        -days "$CERTIFICATE_DAYS" -out "$path.crt.new" -extfile <(
          echo "basicConstraints = critical, CA:FALSE"
          echo "keyUsage = critical, digitalSignature"
          echo "extendedKeyUsage = $4"
          echo "subjectKeyIdentifier = hash"
          echo "authorityKeyIdentifier = keyid:always"
          if [ -n "$names" ]; then echo "subjectAltName = $names"; fi
        ) 2>&1
  ) || fail "$path.crt: $said"
  mv "$path.crt.new" "$path.crt"
  if [ -n "$names" ]; then echo "$names" >"$path.names"; fi
  echo "made  $path.crt"
}

has_names() { # PATH NAMES: whether the certificate was made for these
  [ -z "$2" ] || [ "$(cat "$1.names" 2>/dev/null)" = "$2" ]
}

alternative_names() { # NAME_OR_ADDRESS...
  local name joined=""
  for name in "$@"; do
    if [[ "$name" =~ ^[0-9]+(\.[0-9]+){3}$ || "$name" == *:* ]]; then
      joined+=",IP:$name"
    elif [[ "$name" =~ ^[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?$ ]]; then
      joined+=",DNS:$name"
    else
      fail "'$name' is neither a host name nor an address"
    fi
  done
  echo "${joined#,}"
}

check_id() { # ID: nothing that an MQTT topic or a path could read otherwise; a CN has at most 64 characters
  [[ "$1" =~ ^[A-Za-z0-9_-]{1,64}$ ]] || fail "'$1': wanted letters, digits, '_' or '-', 64 at most with 'client-'"
}

make_broker() {
  local names
  names=$(alternative_names "$@")
  for authority in broker devices clients; do make_authority "$authority"; done
  make_certificate broker/broker broker "edge-runtime broker" serverAuth "$names"
  cp authorities/devices.crt broker/devices-ca.crt
  cp authorities/clients.crt broker/clients-ca.crt
}

make_user() { # device|client ID PREFIX
  check_id "$3$2"
  if [[ "$1" == device && "$2" == client-* ]]; then fail "'$2': a device's id may not begin with 'client-'"; fi
  make_authority broker
  make_authority "$1s"
  make_certificate "$1s/$2/$1" "$1s" "$3$2" clientAuth
  cp authorities/broker.crt "$1s/$2/ca.crt"
}

folder=certificates
if [ "${1:-}" = --folder ]; then
  folder="${2:?--folder wants a path}"
  shift 2
fi
kind="${1:-}"
case "$kind" in
  -h | --help | help) usage; exit ;;
  broker | device | client) shift ;;
  *) usage >&2; exit 2 ;;
esac
[ $# -gt 0 ] || fail "$kind: wanted at least one name"
command -v openssl >/dev/null || fail "openssl is not there. Do: sudo apt-get install openssl"

umask 077
mkdir -p "$folder"
cd "$folder"
case "$kind" in
  broker) make_broker "$@" ;;
  device) for id in "$@"; do make_user device "$id" ""; done ;;
  client) for id in "$@"; do make_user client "$id" client-; done ;;
esac

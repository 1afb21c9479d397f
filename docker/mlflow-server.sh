#!/bin/sh
# Start MLflow's server with authentication on PostgreSQL. Passwords come from files and are in no argument:
# postgres_password, mlflow_admin_password and mlflow_secret_key of $SECRETS; libpq reads PGHOST, PGUSER, PGPASSWORD.
set -eu
secrets=${SECRETS:-/run/secrets}
PGPASSWORD=$(cat "$secrets/postgres_password")
MLFLOW_AUTH_ADMIN_PASSWORD=$(cat "$secrets/mlflow_admin_password")
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$secrets/mlflow_secret_key")
export PGPASSWORD MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
export PGHOST="${PGHOST:-postgres}" PGUSER="${PGUSER:-mlflow}" PGDATABASE="${PGDATABASE:-mlflow}"
export MLFLOW_AUTH_ADMIN_USERNAME="${MLFLOW_AUTH_ADMIN_USERNAME:-admin}"
export MLFLOW_AUTH_CONFIG_PATH="${MLFLOW_AUTH_CONFIG_PATH:-/usr/local/share/mlflow-auth.ini}"
# one process is enough, and jobs would start a dozen more
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
exec mlflow server --app-name basic-auth --workers 1 \
    --backend-store-uri "postgresql:///$PGDATABASE" \
    --serve-artifacts --artifacts-destination "${ARTIFACTS:-/artifacts}" "$@"

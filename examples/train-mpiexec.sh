#!/bin/sh
# Training on several machines with mpiexec and a host file, without a scheduler: examples/train-mpiexec.sh hosts
#
# The file names a machine a line, with how many ranks it takes: `node1:4` for MPICH and its family, `node1 slots=4` for
# Open MPI. The machines share this folder, and ssh works between them. Started again, the run goes on where it was.
hosts=${1:?give a host file}
ranks=$(awk -F'[:=]' '{ ranks += $NF } END { print ranks }' "$hosts")
if mpiexec --version | grep -q "Open MPI\|PRRTE"; then
    option=--hostfile
else
    option=-f
fi
exec mpiexec "$option" "$hosts" -n "$ranks" echelon train configs/gpt-small.toml --run runs/gpt-small

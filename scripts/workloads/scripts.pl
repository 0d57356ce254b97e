# Needs: perl
use IO::Socket::INET;
use File::Temp;
my $s = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1");
my $t = File::Temp->new;
print $t "x";
if (my $p = fork) { waitpid $p, 0 } else { exec "true" } print `echo fine`

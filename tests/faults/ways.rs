//! An application server's own ways to the members of a replica set. They can be cut.

use crate::rig::proxy::Proxy;
use crate::rig::replica_set::ReplicaSet;

#[derive(Clone, Copy, Debug)]
pub(crate) enum From {
    Primary,
    Everything,
}

pub(crate) type Break = fn(&Proxy);

#[derive(Debug)]
pub(crate) struct Ways {
    proxies: Vec<Proxy>,
}

impl Ways {
    pub(crate) fn to(set: &ReplicaSet) -> Self {
        let ports: Vec<_> = set.members().iter().map(|member| member.port()).collect();
        let proxies: Vec<_> = ports.iter().map(|&port| Proxy::start(port)).collect();
        proxies.iter().for_each(|proxy| proxy.stands_for(&ports, &proxies));
        Self { proxies }
    }

    pub(crate) fn uri(&self) -> String {
        let hosts: Vec<_> =
            self.proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        format!("mongodb://{}/?replicaSet=rs0&heartbeatFrequencyMS=500", hosts.join(","))
    }

    pub(crate) fn cut_from(&self, from: From, primary: usize, cut: Break) {
        match from {
            From::Primary => cut(&self.proxies[primary]),
            From::Everything => self.proxies.iter().for_each(cut),
        }
    }

    pub(crate) fn heal(&self) {
        self.proxies.iter().for_each(Proxy::heal);
    }

    pub(crate) fn fired(&self) -> usize {
        self.proxies.iter().map(Proxy::fired).sum()
    }
}
